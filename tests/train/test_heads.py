"""The networks in torch: against those that the engine runs, and against plain code that follows the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quire.engine.text_states import TextStates
from quire.kernels import select_torch
from quire.train.dialogues import Dialogue
from quire.train.features import Batch, FeatureMaker, Inputs, find_anchors, make_batch
from quire.train.files import describe_head, write_config, write_tensors
from quire.train.heads.block import BlockModule
from quire.train.heads.eagle import EagleModule
from quire.train.heads.exit import ExitModule
from quire.train.heads.head import TrainedHead, attend, attend_fused
from quire.train.heads.medusa import MedusaModule
from quire.train.loop import find_bigrams, find_loss
from quire.train.target import Target
from quire.train.vocabulary import DraftVocabulary, choose_draft_ids
from quire.weights.heads import Target as LoadingTarget
from quire.weights.heads import load_block_head, load_medusa
from quire.weights.loader import load_model
from tests.engine.test_heads import answer, questions, record_calls
from tests.engine.test_speculation import CONFIGS, MODELS, OPS
from tests.tools.heads import build_engine
from tests.tools.native import kernels_of
from tests.tools.tiny import FAMILIES, tiny_model
from tests.tools.tiny_models import tiny_directory

pytestmark = pytest.mark.cpu

NUM_IDS = 40
TEXT = [5, 60, 7, 11, 80]


def make_target(family: str = "llama") -> Target:
    return Target(MODELS[family], CONFIGS[family], OPS, "float32")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def disturb(module: nn.Module) -> None:
    """No weight is zero or one any more."""
    noise = generator(9)
    with torch.no_grad():
        for value in module.parameters():
            value += 0.1 * torch.randn(value.shape, generator=noise)


def texts(lengths: Sequence[int], vocab_size: int = 97, num_prompt: int = 3) -> list[Dialogue]:
    rng = np.random.default_rng(3)
    return [Dialogue(rng.integers(0, vocab_size, length, np.int32), num_prompt, False) for length in lengths]


def batch_of(target: Target, inputs: Inputs, dialogues: Sequence[Dialogue]) -> Batch:
    features = list(FeatureMaker(target, inputs, 96, torch.float32).make(dialogues))
    return make_batch(target, features, [find_anchors(each.dialogue) for each in features])


def near(found: Tensor, expected: Tensor, share: float) -> None:
    assert (found - expected).norm() < share * expected.norm(), (found - expected).norm() / expected.norm()


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("kind", ["block", "two layers", "medusa"])
def test_states_are_those_of_the_engine(kind: str, family: str, tmp_path: Path) -> None:
    """Each call of the head in the engine, against the module on the features of the same tokens. The engine's weights
    are int8."""
    target = make_target(family)
    ids = torch.arange(0, 2 * NUM_IDS, 2)
    module: Any
    if kind == "medusa":
        module = MedusaModule(target, 3)
    else:
        module = BlockModule(target, 4, 1 if kind == "block" else 2, NUM_IDS, generator())
    disturb(module)
    kind = "medusa" if kind == "medusa" else "block"
    write_tensors(tmp_path, module.state_dict(), ids)
    write_config(tmp_path, describe_head(kind, target.model, target.config, module.describe()))
    load = load_medusa if kind == "medusa" else load_block_head
    heads: Any = {kind: load(tmp_path, LoadingTarget(target.model, target.config), OPS)}
    engine, (proposer,) = build_engine(target.config, target.model, OPS, heads)
    calls = record_calls(proposer)
    answer(engine, questions())
    assert len(calls) > 5
    for tokens, _, states in calls[:: len(calls) // 5]:
        # The last token is not computed: the anchor. A token more behind it, so that it is one.
        dialogue = Dialogue(np.array([*tokens, 0], np.int32), len(tokens) - 1, False)
        with torch.no_grad():
            found = module(batch_of(target, module.inputs, [dialogue]))
        near(found[0, 0], torch.from_numpy(states), 0.05)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_keys_and_values_are_those_of_the_cache(family: str) -> None:
    config = FAMILIES[family]
    ops = select_torch("cpu")
    target = Target(tiny_model(config), config, ops)
    dialogues = texts([5, 21, 2])
    states = TextStates(target.model, ops, "float32", range(config.num_layers), max_tokens=64)
    computed = states.compute([dialogue.tokens.tolist() for dialogue in dialogues])
    starts = [0, 5, 26]
    for layer in range(1, config.num_layers):
        cache = states._cache.layers[layer]
        block = 1 + cache.group * 4
        for dialogue, found, _ in zip(dialogues, computed, starts, strict=True):
            k, v = target.keys_values(layer, found.taps[layer - 1], torch.arange(len(dialogue.tokens)))
            num_blocks = -(-len(dialogue.tokens) // 16)
            for mine, kept in ((k, cache.k), (v, cache.v)):
                stored = kept[block : block + num_blocks].flatten(0, 1)[: len(dialogue.tokens)]
                torch.testing.assert_close(mine, stored)
            block += num_blocks


def test_keys_and_values_are_those_that_native_kernels_read() -> None:
    """Attention over the kernels' own cache, and over the keys and values that were computed again."""
    target = make_target()
    tokens = texts([37])[0].tokens
    states = TextStates(target.model, OPS, "float32", [0, 1], max_tokens=48)
    found = states.compute([tokens.tolist()])[0]
    paging = states._page([0, 37], [37])
    for layer in (1, 2):
        attention = target.model.layers[layer].attention
        k, v = target.keys_values(layer, target.as_tensor(found.taps[layer - 1]).clone(), torch.arange(37))
        q = torch.randn(37, attention.heads[0], attention.head_dim, generator=generator(layer))
        options = {"scale": attention.scale, "window": None, "slopes": None, "softcap": None}
        expected = OPS.attention(q.numpy(), states._cache.layers[layer], paging, **options)
        seen = torch.ones(37, 37, dtype=torch.bool).tril()
        mine = attend(q[None], [(k[None], v[None], seen[None])], attention.scale)
        fused = attend_fused(q[None], k[None], v[None], seen[None], attention.scale)
        torch.testing.assert_close(fused, mine, atol=0.03, rtol=0.03)  # bfloat16
        torch.testing.assert_close(mine.view(q.shape), torch.from_numpy(np.asarray(expected)), atol=1e-4, rtol=1e-4)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def turn(x: Tensor, position: int, theta: float) -> Tensor:
    """x [heads, dim], pairs (i, i + dim / 2)"""
    half = x.shape[1] // 2
    angles = position * theta ** (-torch.arange(half).double() / half)
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.cat([x[:, :half] * cos - x[:, half:] * sin, x[:, half:] * cos + x[:, :half] * sin], dim=1)


class PlainEagle:
    """One row after the other, with the keys and values of the rows before it."""

    def __init__(self, tensors: dict[str, Tensor], config: dict[str, Any], window: int | None) -> None:
        self.window = window
        self.tensors = {name.removeprefix("midlayer."): value for name, value in tensors.items()}
        self.config = config

    def row(self, g: Tensor, e: Tensor, position: int, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The output of a row. Its key and value are appended to `past`."""
        t, config = self.tensors, self.config
        eps, dim, theta = config["rms_norm_eps"], config["head_dim"], config["rope_theta"]
        x = torch.cat([rms(e, t["input_layernorm.weight"], eps), rms(g, t["hidden_norm.weight"], eps)])
        q, k, v = ((t[f"self_attn.{name}_proj.weight"] @ x).view(-1, dim) for name in "qkv")
        past.append((turn(k, position, theta), v))
        q = turn(q, position, theta)
        groups = len(q) // len(k)
        seen = past if self.window is None else past[-self.window :]
        out = []
        for head in range(len(q)):
            keys, values = (torch.stack([pair[which][head // groups] for pair in seen]) for which in (0, 1))
            out.append((keys @ q[head] * dim**-0.5).softmax(0) @ values)
        x = g + t["self_attn.o_proj.weight"] @ torch.cat(out)
        normed = rms(x, t["post_attention_layernorm.weight"], eps)
        gate, up = t["mlp.gate_proj.weight"] @ normed, t["mlp.up_proj.weight"] @ normed
        return x + t["mlp.down_proj.weight"] @ (nn.functional.silu(gate) * up)


@pytest.mark.parametrize("window", [None, 6, 2])
@pytest.mark.parametrize("family", CONFIGS)
def test_eagle_is_what_its_formulas_say(family: str, window: int | None) -> None:
    """Drafts of an anchor, made one after the other with a cache, as an engine makes them."""
    target = make_target(family)
    target.config = replace(target.config, windows=(window,) * len(target.config.windows))
    module = EagleModule(target, 3, generator(), TEXT)
    disturb(module)
    dialogues = texts([9, 14])
    batch = batch_of(target, module.inputs, dialogues)
    with torch.no_grad():
        found = module(batch)
    described, tensors = module.describe(), {name: value.detach() for name, value in module.state_dict().items()}
    assert set(tensors) == {
        "fc.weight", "norm.weight", "midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight",
        "midlayer.post_attention_layernorm.weight",
        *(f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    }  # fmt: skip
    plain = PlainEagle(tensors, described, window)
    for row, dialogue in enumerate(dialogues):
        embedded = target.embed(torch.from_numpy(dialogue.tokens).long())
        for nth, anchor in enumerate(find_anchors(dialogue).tolist()):
            past: list[tuple[Tensor, Tensor]] = []
            g = torch.zeros(0)
            for position in range(anchor):
                g = tensors["fc.weight"] @ batch.taps[row, position].flatten()
                g = plain.row(g, embedded[position + 1], position, past)
            for step in range(3):
                near(found[row, nth, step], rms(g, tensors["norm.weight"], described["rms_norm_eps"]), 1e-3)
                if anchor + step + 1 >= len(dialogue.tokens):
                    break
                g = plain.row(g, embedded[anchor + step + 1], anchor + step, past)


def test_eagle_starts_as_the_last_layer() -> None:
    """With the target's own state as input and no embedding, its attention is that of the last layer."""
    target = make_target()
    module = EagleModule(target, 1, generator(), TEXT)
    attention = module.midlayer.self_attn
    size = target.hidden_size
    layer: Any = target.model.layers[-1]
    x = torch.randn(6, size, generator=generator(1))
    with torch.no_grad():
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight[:, :size] = 0
        q, k, v = attention.project(torch.cat([x, module.midlayer.hidden_norm(x)], dim=-1)[None])
    keys, values = target.keys_values(len(target.model.layers) - 1, x, torch.arange(6))
    near(k[0] @ k[0].transpose(1, 2), keys @ keys.transpose(1, 2), 0.05)
    near(v[0] - (module.midlayer.self_attn.v_proj.weight[:, :size] @ x.T).T.view(v[0].shape), values, 0.05)
    assert q.shape[2] == layer.attention.heads[0]


@pytest.mark.parametrize("family", CONFIGS)
def test_an_exit_is_what_its_formulas_say(family: str) -> None:
    target = make_target(family)
    module = ExitModule(target, 2, generator(), TEXT)
    disturb(module)
    batch = batch_of(target, module.inputs, texts([9, 14]))
    t, eps = {name: value.detach() for name, value in module.state_dict().items()}, target.config.norm_eps
    assert set(t) == {"norm.weight", "adapter_down.weight", "adapter_up.weight", "out_norm.weight"}
    with torch.no_grad():
        found = module(batch)
    x = batch.taps[1, int(batch.anchors[1, 2]), 0]
    inner = t["adapter_down.weight"] @ rms(x, t["norm.weight"], eps)
    y = x + t["adapter_up.weight"] @ nn.functional.silu(inner)
    near(found[1, 2, 0], rms(y, t["out_norm.weight"], eps), 1e-4)
    assert module.describe()["layer"] == 2


def make_modules(target: Target) -> list[TrainedHead]:
    return [
        BlockModule(target, 3, 1, NUM_IDS, generator()),
        MedusaModule(target, 3),
        EagleModule(target, 3, generator(), TEXT),
        ExitModule(target, 1, generator(), TEXT),
    ]


def plain_loss(
    module: Any, states: Tensor, batch: Batch, vocabulary: DraftVocabulary, target: Target, decay: float
) -> Tensor:
    """The same in plain torch, one draft at a time."""
    total, weights = torch.zeros(()), 0.0
    head = torch.from_numpy(np.asarray(target.model.head.weight.dense()))
    drafted = vocabulary.ids.tolist()
    softcap = target.softcap

    def cap(x: Tensor) -> Tensor:
        return x if softcap is None else softcap * torch.tanh(x / softcap)

    for row, dialogue in enumerate(batch.dialogues):
        tokens = dialogue.tokens.tolist()
        for nth in range(int(batch.is_anchor[row].sum())):
            anchor = int(batch.anchors[row, nth])
            own = [token for token in dict.fromkeys(tokens[: anchor + 1]) if token not in drafted]
            ids = torch.tensor([*drafted, *own])
            for place in range(states.shape[2]):
                if anchor + place + 1 >= len(tokens):
                    continue
                logits = cap(head[ids] @ states[row, nth, place])
                if module.bigrams is not None and place and tokens[anchor + place] in drafted:
                    before = module.bigrams.before[drafted.index(tokens[anchor + place])]
                    logits = logits + nn.functional.pad(module.bigrams.after @ before, (0, len(own)))
                wanted = cap(head[ids] @ batch.hidden[row, anchor + place]).softmax(0)
                total = total - decay**place * (wanted * logits.log_softmax(0)).sum()
                weights += decay**place
    return total / weights


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("nth", range(4), ids=["block", "medusa", "eagle", "exit"])
def test_loss_and_gradients_are_those_of_plain_torch(nth: int, family: str) -> None:
    """With softcaps, own tokens that come later, bigrams, and drafts behind the end of an answer."""
    target = make_target(family)
    target.model.head.softcap, before = 7.0, target.model.head.softcap
    try:
        vocabulary = DraftVocabulary(target, torch.arange(0, 2 * NUM_IDS, 2))
        module: Any = make_modules(target)[nth]
        disturb(module)
        batch = batch_of(target, module.inputs, texts([9, 14]))
        gradients = []
        losses = []
        for find in (
            lambda states: find_loss(module, states, batch, vocabulary),
            lambda states: plain_loss(module, states, batch, vocabulary, target, 0.8),
        ):
            module.zero_grad()
            loss = find(module(batch))
            loss.backward()
            losses.append(float(loss.detach()))
            gradients.append({name: value.grad for name, value in module.named_parameters()})
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
        for name in gradients[0]:
            torch.testing.assert_close(gradients[0][name], gradients[1][name], atol=2e-5, rtol=1e-3, msg=name)
    finally:
        target.model.head.softcap = before


def test_the_first_place_has_no_bigram() -> None:
    target = make_target()
    module = BlockModule(target, 2, 1, NUM_IDS, generator())
    vocabulary = DraftVocabulary(target, torch.arange(NUM_IDS))
    batch = batch_of(target, module.inputs, texts([9]))
    before, after = find_bigrams(module, module(batch), batch, vocabulary)
    assert not before[:, :, 0].any()
    assert before[:, :, 1].any()
    assert after.shape[0] == NUM_IDS


def test_draft_ids_are_those_that_answers_have() -> None:
    dialogue = Dialogue(np.array([9, 9, 9, 50, 50, 7, 60], np.int32), 3, False)
    assert choose_draft_ids([dialogue], 2, 97).tolist() == [7, 50]
    assert choose_draft_ids([dialogue], 5, 97).tolist() == [0, 1, 7, 50, 60]


def test_own_tokens_are_drafted_once_they_are_there() -> None:
    target = make_target()
    vocabulary = DraftVocabulary(target, torch.arange(10))
    dialogue = Dialogue(np.array([3, 90, 5, 91, 90, 4], np.int32), 2, False)
    columns = vocabulary.columns(dialogue)
    assert columns.ids.tolist() == [*range(10), 90, 91]
    logits = vocabulary.logits(torch.randn(3, target.hidden_size), columns, torch.tensor([0, 2, 3]))
    assert logits.isfinite().sum(1).tolist() == [10, 11, 12]


def test_the_target_in_torch_gives_the_same_features(tmp_path: Path) -> None:
    """Native kernels round to int8; torch's ops do not."""
    path = tiny_directory(tmp_path)
    inputs = Inputs((0, 1), (0, 1))
    made = []
    for ops in (kernels_of(), select_torch("cpu")):
        loaded = load_model(path, dtype="float32", ops=ops, packed=ops.native is not None)
        target = Target(loaded.model, loaded.config, ops)
        (features,) = FeatureMaker(target, inputs, 64, torch.float32).make(texts([20], 96))
        made.append(features)
    for name in ("taps", "hidden"):
        near(getattr(made[0], name), getattr(made[1], name), 0.02)
    for index in range(2):
        near(made[0].keys[index], made[1].keys[index], 0.02)
        near(made[0].values[index], made[1].values[index], 0.02)
