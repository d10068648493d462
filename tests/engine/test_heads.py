"""Draft heads: what they compute against plain torch, and that answers with them are those without."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from quire.config import EngineConfig
from quire.core.drafts import Drafts
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.build import build_engine as build
from quire.engine.draft_heads import LOADERS, LoadedHead
from quire.engine.draft_vocabulary import MAX_OWN, OwnTokens
from quire.engine.engine import Engine
from quire.engine.heads import Bigrams, HeadProposer, find_candidates, grow_native
from quire.engine.sampling_state import signed
from quire.engine.speculation import HEAD_KINDS
from quire.errors import BadModelFile, InvalidParams, ModelNotFound
from quire.kernels.gumbel import gumbel
from quire.kernels.reference_sampling import gumbel as reference_gumbel
from quire.models.config import ModelConfig
from quire.models.decoder import Decoder
from quire.speculative.draft_tree import grow_tree
from quire.speculative.step_times import EqualTimes
from quire.speculative.suffix import SuffixProposer
from quire.weights.heads import Target, load_block_head, load_medusa
from quire.weights.loader import load_model
from tests.engine.test_speculation import CONFIGS, ENGINES, MODELS, OPS, VOCAB_SIZE, make_engine, make_requests
from tests.tools.heads import block_config, block_tensors, build_engine, medusa_config, medusa_tensors, write_head
from tests.tools.native import native_model
from tests.tools.oracle import run
from tests.tools.tiny_models import tiny_directory

pytestmark = pytest.mark.cpu

KINDS = ("block", "medusa", "trimmed medusa")


def make_head(kind: str, family: str, directory: Path, seed: int = 0) -> tuple[dict[str, LoadedHead], dict[str, Any]]:
    """A head with random weights, loaded from its files, and its tensors."""
    target = Target(MODELS[family], CONFIGS[family])
    if kind == "block":
        config = block_config(target)
        tensors = block_tensors(config, target.config, seed=seed)
        return {"block": load_block_head(write_head(directory, config, tensors), target, OPS)}, tensors
    config = medusa_config(target)
    tensors = medusa_tensors(config, target.config, 50 if kind == "trimmed medusa" else None, seed)
    return {"medusa": load_medusa(write_head(directory, config, tensors), target, OPS)}, tensors


def test_a_kind_that_imports_the_heads_has_a_loader() -> None:
    assert tuple(LOADERS) == HEAD_KINDS


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", ["roomy", "few blocks", "swap", "int8"])
def test_answers_are_the_same(kind: str, family: str, settings: str, tmp_path: Path) -> None:
    """Greedy, sampled, grammars, n, log probabilities, penalties, prefix hits and preemption, in batches of 7."""
    config, count = CONFIGS[family], 27
    heads, _ = make_head(kind, family, tmp_path)
    kv_dtype = {name: value for name, value in ENGINES[settings].items() if name == "kv_dtype"}
    expected = run(make_engine(config, 32, kv_dtype), make_requests(11, count))
    for proposers in ([], [SuffixProposer()]):
        engine, models = build_engine(
            config, MODELS[family], OPS, heads, list(proposers), max_requests=7, **ENGINES[settings]
        )
        found = run(engine, make_requests(11, count))
        assert found == expected
        assert engine.controller is not None
        assert engine.controller.models == models, "the head failed"
        assert engine.controller.drafted[models[0].name] > 50


@dataclass
class Recorder:
    """A head that keeps what it is given and what it proposes."""

    inner: Any
    calls: list[tuple[list[int], np.ndarray, np.ndarray]]

    @property
    def depth(self) -> int:
        return self.inner.depth

    @property
    def bigrams(self) -> Any:
        return self.inner.bigrams

    def states(self, requests: Sequence[Request], features: np.ndarray) -> np.ndarray:
        states = self.inner.states(requests, features)
        self.calls += [
            (list(request.tokens), feature.copy(), state.copy())
            for request, feature, state in zip(requests, features, states, strict=True)
        ]
        return states


def record_calls(proposer: Any) -> list[tuple[list[int], np.ndarray, np.ndarray]]:
    assert isinstance(proposer, HeadProposer)
    recorder = Recorder(proposer._head, [])
    proposer._head = recorder
    return recorder.calls


def questions(sampled: bool = False, count: int = 5) -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    requests = []
    for number in range(count):
        prompt = torch.randint(0, VOCAB_SIZE, (3 + 9 * number,), generator=generator).tolist()
        params = SamplingParams(temperature=0.9 if sampled else 0.0, max_tokens=None)
        requests.append(Request(f"{number}", prompt, params, seed=2**63 + number, max_tokens=12))
    return requests


def answer(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return [request.tokens[request.num_prompt :] for request in requests]


class PlainTarget:
    """The target in plain torch, one sequence at a time: its keys and values, taps and final states."""

    def __init__(self, config: ModelConfig, model: Decoder) -> None:
        self.config = config
        self.model = model

    def __call__(self, tokens: Sequence[int]) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor], Tensor]:
        x = rows_of(self.model.embedding, tokens)
        keys_values, taps = [], []
        for layer in self.model.layers:
            attention: Any = layer.attention
            normed = norm(x, layer.input_norm)  # type: ignore[attr-defined]
            qkv = normed @ dense(attention.qkv.weight).T
            q, k, v = qkv.view(len(tokens), -1, attention.head_dim).split(attention.heads, dim=1)
            q, k = (rotate(each, attention, torch.arange(len(tokens))) for each in (q, k))
            keys_values.append((k, v))
            mask = torch.ones(len(tokens), len(tokens)).tril().bool()
            x = x + attend(q, k, v, attention.scale, mask).flatten(1) @ dense(attention.output.weight).T
            mlp: Any = layer.mlp  # type: ignore[attr-defined]
            gate, up = (norm(x, layer.mlp_norm) @ dense(mlp.gate_up.weight).T).chunk(2, dim=1)  # type: ignore[attr-defined]
            x = x + (functional.silu(gate) * up) @ dense(mlp.down.weight).T
            taps.append(x)
        return keys_values, taps, norm(x, self.model.norm)


def rows_of(embedding: Any, tokens: Sequence[int]) -> Tensor:
    return torch.from_numpy(embedding.weight.rows(np.array(tokens)))


def dense(weight: Any) -> Tensor:
    return torch.from_numpy(weight.dense())


def norm(x: Tensor, module: Any) -> Tensor:
    return rms(x, torch.from_numpy(module.weight), module.eps)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotate(x: Tensor, attention: Any, positions: Tensor) -> Tensor:
    cos, sin = torch.from_numpy(attention.rotary.table)[positions].chunk(2, dim=1)
    first, second = x.chunk(2, dim=2)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """q [n, heads, dim], k and v [m, kv_heads, dim]"""
    groups = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(groups, dim=1) for each in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v)


def block_states(tensors: dict[str, Tensor], config: Any, target: PlainTarget, tokens: Sequence[int]) -> Tensor:
    """The block head of docs/speculation.md in plain torch. The last token is not computed by the target."""
    keys_values, taps, final = target(tokens[:-1])
    inputs = [
        *(taps[layer][-1] for layer in config.tap_layers),
        final[-1],
        rows_of(target.model.embedding, tokens[-1:])[0],
    ]
    eps = config.norm_eps
    joined = torch.cat([rms(x, tensors[f"norms.{nth}.weight"], eps) for nth, x in enumerate(inputs)])
    x = tensors["in_proj.weight"] @ joined + tensors["slots.weight"]
    for nth, layer in enumerate(config.kv_layers):
        name, attention = f"layers.{nth}", target.model.layers[layer].attention
        q = rms(x, tensors[f"{name}.input_layernorm.weight"], eps) @ tensors[f"{name}.self_attn.q_proj.weight"].T
        positions = len(tokens) - 1 + torch.arange(config.depth)
        q = rotate(q.view(config.depth, -1, attention.head_dim), attention, positions)
        out = attend(q, *keys_values[layer], attention.scale, None).flatten(1)
        x = x + out @ tensors[f"{name}.self_attn.o_proj.weight"].T
        normed = rms(x, tensors[f"{name}.post_attention_layernorm.weight"], eps)
        gate, up = (normed @ tensors[f"{name}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (functional.silu(gate) * up) @ tensors[f"{name}.mlp.down_proj.weight"].T
    return rms(x, tensors["norm.weight"], eps)


def medusa_states(tensors: dict[str, Tensor], config: Any, hidden: Tensor) -> Tensor:
    states = []
    for head in range(config.num_heads):
        x = hidden
        for layer in range(config.num_layers):
            name = f"{head}.{layer}.linear"
            x = x + functional.silu(tensors[f"{name}.weight"] @ x + tensors[f"{name}.bias"])
        states.append(x)
    return torch.stack(states)


@pytest.mark.parametrize("kind", ["block", "medusa"])
def test_states_are_those_of_plain_torch(kind: str, tmp_path: Path) -> None:
    """Prompts and drafted rows, with other requests in the batch, prefix hits and accepted drafts."""
    config, model = CONFIGS["llama"], MODELS["llama"]
    heads, arrays = make_head(kind, "llama", tmp_path)
    engine, (proposer,) = build_engine(config, model, OPS, heads, [SuffixProposer()])
    calls = record_calls(proposer)
    repeated = Request("again", [7, 8, 9, 10] * 6, SamplingParams(temperature=0.0, max_tokens=None), max_tokens=20)
    answer(engine, [*questions(), repeated])
    assert len(calls) > 30
    target, tensors = PlainTarget(config, model), {name: torch.from_numpy(each) for name, each in arrays.items()}
    (loaded,) = heads.values()
    for tokens, feature, states in calls[::5]:
        _, _, final = target(tokens[:-1])
        near(torch.from_numpy(feature[-1]), final[-1], 0.05)
        if kind == "block":
            expected = block_states(tensors, loaded.head.config, target, tokens)  # type: ignore[union-attr]
        else:
            expected = medusa_states(tensors, loaded.heads.config, final[-1])  # type: ignore[union-attr]
        near(torch.from_numpy(states), expected, 0.1)


def near(found: Tensor, expected: Tensor, share: float) -> None:
    """Activations and weights are rounded to int8."""
    assert (found - expected).norm() < share * expected.norm()


def one_call(kind: str, tmp_path: Path, sampled: bool, max_drafts: int = 8) -> tuple[Any, Request, Drafts, Any, Any]:
    """The drafts of a request in the middle of its answer, and what they were made of."""
    heads, tensors = make_head(kind, "llama", tmp_path)
    engine, (proposer,) = build_engine(CONFIGS["llama"], MODELS["llama"], OPS, heads)
    request = questions(sampled, 4)[-1]
    engine.add(request)
    while request.num_output < 5:
        engine.step()
    calls = record_calls(proposer)
    drafts = proposer.propose_requests([request], [max_drafts])[0]
    assert drafts is not None
    return proposer, request, drafts, torch.from_numpy(calls[-1][2]), tensors


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_the_best_candidates(kind: str, sampled: bool, tmp_path: Path) -> None:
    """The first draft is the best of all tokens that can be drafted, by logit and noise; so is the one behind it."""
    _, request, drafts, states, tensors = one_call(kind, tmp_path, sampled)
    assert drafts.parents is not None
    head = dense(MODELS["llama"].head.weight)
    ids = torch.arange(VOCAB_SIZE)
    if "draft_ids" in tensors:
        own = sorted(set(request.tokens) - set(tensors["draft_ids"].tolist()))
        assert own
        ids = torch.cat((torch.from_numpy(tensors["draft_ids"]), torch.tensor(own)))
    token = None
    node = -1
    for place in range(2):
        matrix = torch.from_numpy(tensors[f"{place}.2.weight"]) if "0.2.weight" in tensors else head[ids]
        logits = (matrix @ states[place]).log_softmax(0)
        if token is not None and kind == "block":
            logits = logits + bigram_bias(tensors, token, ids)
        if sampled:
            length = torch.tensor(len(request.tokens) + place)
            logits = logits + 0.9 * reference_gumbel(torch.tensor(signed(request.seed)), length, VOCAB_SIZE)[ids]
        children = [each for each in range(len(drafts)) if drafts.parents[each] == node]
        node = children[0]
        token = drafts.tokens[node]
        assert logits[ids == token] > logits.max() - 0.3  # int8


def bigram_bias(tensors: dict[str, Any], token: int, ids: Tensor) -> Tensor:
    known = {each: nth for nth, each in enumerate(tensors["draft_ids"].tolist())}
    if token not in known:
        return torch.zeros(len(ids))
    before = tensors["bigram_in.weight"][known[token]]
    return torch.tensor(
        [float(tensors["bigram_out.weight"][known[each]] @ before) if each in known else 0.0 for each in ids.tolist()]
    )


def test_noise_is_that_of_the_reference() -> None:
    ids = np.array([[3, 900, 17, 64], [5, 6, 999, 8]])
    seeds, lengths = np.array([-(2**62) - 12345, 77]), np.array([5, 2**33 + 1])
    for found in (gumbel(seeds, lengths, ids), OPS.gumbel(seeds, lengths, ids)):
        for row in range(2):
            expected = reference_gumbel(torch.tensor(seeds[row]), torch.tensor(lengths[row]), 1000)
            assert found[row].tolist() == pytest.approx(expected[torch.from_numpy(ids[row])].tolist(), abs=1e-6)


@pytest.mark.parametrize("with_bigrams", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_trees_are_those_of_the_reference(temperature: float, with_bigrams: bool) -> None:
    """Random candidates, with ties, values that are left out, and values that end the tree."""
    rng = np.random.default_rng(3)
    vocab_size, num_ids, rank = 300, 200, 5
    index = np.full(vocab_size, -1, np.int64)
    index[rng.permutation(vocab_size)[:num_ids]] = np.arange(num_ids)
    before, after = (rng.standard_normal((num_ids, rank)).astype(np.float32) for _ in range(2))
    bigrams = Bigrams(before, after, index) if with_bigrams else None

    def bias(tokens: np.ndarray) -> Callable[[int], np.ndarray]:
        def add(token: int) -> np.ndarray:
            rows = np.where(index[tokens][:, None] < 0, 0.0, after[index[tokens]])
            return (rows @ before[index[token]] * (index[token] >= 0)).astype(np.float32)

        return add

    num_nodes = 0
    for nth in range(60):
        depth, count = rng.integers(1, 6), rng.integers(1, 20)
        tokens = np.stack([rng.permutation(vocab_size)[:count] for _ in range(depth)])
        logprobs = np.log(rng.dirichlet(np.full(count + 3, 0.4), depth)[:, :count]).astype(np.float32)
        logprobs[:, rng.integers(0, count)] = -np.inf
        if nth % 6 == 0:
            logprobs[-1, 0] = (np.nan, -np.inf, np.inf)[nth // 6 % 3]
        if nth % 7 == 0:
            logprobs[0] = logprobs[0, 0]
        params = SamplingParams(temperature=temperature)
        request = Request("a", [1, 2, 3], params, max_tokens=9, seed=nth - 30)
        most = int(rng.integers(1, 12))
        found = grow_native(request, tokens, logprobs, most, bigrams, OPS.native)
        expected = grow_tree(find_candidates(request, tokens, logprobs, OPS), most, bias if with_bigrams else None)
        assert (found.tokens, found.parents) == (expected.tokens, expected.parents)
        assert found.odds == pytest.approx(expected.odds, rel=1e-5)
        num_nodes += len(found)
    assert num_nodes > 150


def test_a_tree_has_as_many_nodes_as_it_may(tmp_path: Path) -> None:
    for most in (1, 3, 8):
        _, _, drafts, _, _ = one_call("block", tmp_path, False, most)
        assert 1 <= len(drafts) <= most
        assert drafts.parents is not None
        assert len(set(zip(drafts.parents, drafts.tokens, strict=True))) == len(drafts)
        assert all(0.0 < odds <= 1.0 for odds in drafts.odds)


@pytest.mark.parametrize("name", ["in_proj.weight", "slots.weight", "bigram_in.weight", "layers.1.mlp.up_proj.weight"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_no_numbers_are_refused(name: str, value: float, tmp_path: Path) -> None:
    target = Target(MODELS["llama"], CONFIGS["llama"])
    config = block_config(target)
    tensors = block_tensors(config, target.config)
    tensors[name][1, 1] = value
    with pytest.raises(BadModelFile, match="Train the head again"):
        load_block_head(write_head(tmp_path, config, tensors), target, OPS)


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in ("norm.weight", "norms.2.weight") for value in (math.nan, math.inf, 1e30)]
    + [(name, 1e30) for name in ("slots.weight", "bigram_in.weight")],
)
def test_hostile_values_do_no_harm(name: str, value: float, tmp_path: Path) -> None:
    target = Target(MODELS["llama"], CONFIGS["llama"])
    config = block_config(target)
    tensors = block_tensors(config, target.config)
    tensors[name][...] = value
    head = load_block_head(write_head(tmp_path, config, tensors), target, OPS)
    engine, models = build_engine(CONFIGS["llama"], MODELS["llama"], OPS, {"block": head})
    requests = questions()
    plain = make_engine(CONFIGS["llama"], 8, {})
    assert answer(engine, requests) == answer(plain, questions())
    assert engine.controller is not None
    assert engine.controller.models == models


def test_what_a_request_had_is_dropped_at_its_end(tmp_path: Path) -> None:
    heads, _ = make_head("block", "llama", tmp_path)
    engine, (proposer,) = build_engine(CONFIGS["llama"], MODELS["llama"], OPS, heads)
    assert isinstance(proposer, HeadProposer)
    features, output = proposer._features, proposer._output
    requests = questions()
    for request in requests:
        engine.add(request)
    while not all(request.num_output > 3 for request in requests):
        engine.step()
    assert set(features._features) == {request.id for request in requests}
    engine.abort("1")
    assert "1" not in features._features
    assert engine.controller is not None
    engine.controller.reset()
    assert not features._features
    assert not output._own  # type: ignore[attr-defined]
    assert proposer.propose_requests([requests[0]], [4]) == [None]  # until its next step
    answer(engine, [])
    short = Request("short", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=None), max_tokens=1)
    answer(engine, [short])
    assert not features._features
    assert not output._own  # type: ignore[attr-defined]


def test_features_are_bounded(tmp_path: Path) -> None:
    heads, _ = make_head("block", "llama", tmp_path)
    engine, (proposer,) = build_engine(CONFIGS["llama"], MODELS["llama"], OPS, heads, max_requests=3)
    assert isinstance(proposer, HeadProposer)
    requests = questions(count=5)
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
        assert len(proposer._features._features) <= 3


def test_many_own_tokens() -> None:
    """More distinct tokens than a request's own matrix holds, and new ones in every step."""
    config = replace(CONFIGS["llama"], vocab_size=1500)
    model, native = native_model(config, OPS), OPS.native
    assert native is not None
    own, drafted = OwnTokens(model.head, native), np.zeros(1500, np.bool_)
    drafted[::10] = True
    tokens: list[int] = []
    states = np.random.default_rng(0).standard_normal((3, config.hidden_size)).astype(np.float32)
    for count in (1, 5, 60, 61, 62, 300, 301, 1490):
        tokens += range(len(tokens), count)
        own.add(tokens, drafted)
        expected = [token for token in tokens if token % 10][:MAX_OWN]
        assert own.ids[: len(own)].tolist() == expected
        out = np.full((3, len(own)), np.nan, np.float32)
        own.multiply(states, out)
        products = states @ model.head.weight.rows(np.array(expected, np.int64)).T
        np.testing.assert_allclose(out, products, atol=0.02 * np.abs(products).max(initial=0.0))
    assert len(own) == MAX_OWN


@pytest.mark.parametrize("kind", ["block", "medusa"])
def test_an_engine_with_a_head_from_its_configuration(kind: str, tmp_path: Path) -> None:
    path = tiny_directory(tmp_path / "model")
    options: dict[str, Any] = {"model": str(path), "device": "cpu", "num_blocks": 64, "max_requests": 4}
    plain = build(EngineConfig(kernels="native", speculate="off", **options), path)
    loaded = load_model(path, dtype="float32", ops=OPS)
    target, directory = Target(loaded.model, loaded.config), tmp_path / "head"
    if kind == "block":
        config = block_config(target, kv_layers=[1])
        write_head(directory, config, block_tensors(config, target.config))
    else:
        config = medusa_config(target)
        write_head(directory, config, medusa_tensors(config, target.config))
    engine = build(EngineConfig(kernels="native", speculate=f"{kind}:{directory}", **options), path)
    assert engine.controller is not None
    (model,) = engine.controller.models
    assert model.name == kind
    engine.controller.times, engine.controller._clock = EqualTimes(12.0), lambda: 0.0

    def requests() -> list[Request]:
        params = SamplingParams(temperature=0.0, max_tokens=None)
        return [Request(f"{number}", [5, 6 + number, 7], params, max_tokens=40) for number in range(6)]

    assert answer(engine, requests()) == answer(plain, requests())
    assert engine.controller.models == [model]
    assert engine.controller.drafted[kind] > 20
    with pytest.raises(InvalidParams, match=f"{kind}:.*CPU kernels"):
        build(EngineConfig(kernels="torch", speculate=f"{kind}:{directory}", **options), path)
    with pytest.raises(ModelNotFound, match="not a directory"):
        build(EngineConfig(kernels="native", speculate=f"{kind}:{directory}/none", **options), path)
    both = f"{kind}:{directory},{kind}:{directory}"
    with pytest.raises(InvalidParams, match="two heads"):
        build(EngineConfig(kernels="native", speculate=both, **options), path)
