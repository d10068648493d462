"""EAGLE heads: what they compute against plain torch, and that answers with them are those without."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from quire.config import EngineConfig
from quire.core.drafts import ROOT, Drafts
from quire.core.params import SamplingParams
from quire.core.plan import Plan, Sampled
from quire.core.request import Request
from quire.engine.build import build_engine as build
from quire.engine.draft_heads import LoadedHead
from quire.engine.eagle import EagleProposer
from quire.engine.recorded_eagle import EagleRow, RecordedEagle
from quire.engine.sampling_state import signed
from quire.errors import BadModelFile, InvalidParams, UnsupportedModel
from quire.kernels import select_torch
from quire.kernels.paging import LayerCache, Paging
from quire.kernels.reference_sampling import gumbel as reference_gumbel
from quire.layers.rotary import RotaryTable, plain_frequencies
from quire.layers.source import Part
from quire.models.eagle import EagleConfig
from quire.models.registry import MODELS as FAMILIES
from quire.quant.dense import Dense
from quire.speculative.step_times import EqualTimes
from quire.speculative.suffix import SuffixProposer
from quire.weights.eagle import LoadedEagle, load_eagle
from quire.weights.heads import Target
from quire.weights.loader import load_model
from quire.weights.mtp import load_mtp
from tests.engine.test_heads import PlainTarget, answer, near, rms, rotate, rows_of
from tests.engine.test_speculation import (
    CONFIGS,
    ENGINES,
    MODELS,
    OPS,
    VOCAB_SIZE,
    make_engine,
    make_requests,
)
from tests.tools.eagle import KINDS, eagle_config, eagle_tensors, mtp_tensors
from tests.tools.heads import block_config, block_tensors, build_engine, write_head
from tests.tools.native import PanelSource, all_of, mixed, native_model
from tests.tools.oracle import run
from tests.tools.tiny_models import tiny_config, tiny_directory, tiny_weights, write_directory

pytestmark = pytest.mark.cpu

NUM_DRAFTS = 8  # of a request, where drafts are compared
Tree = tuple[list[int], list[int] | None, list[float]]


@pytest.fixture(autouse=True)
def always_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random head is hardly ever right. It is asked in each step nevertheless."""
    monkeypatch.setattr("quire.speculative.controller.choose_depth", lambda *arguments: 4)


def make_head(
    kind: str, family: str, directory: Path, seed: int = 0, **changes: Any
) -> tuple[dict[str, LoadedHead], dict[str, Any]]:
    """A head with random weights, loaded from its files, and its tensors."""
    target = Target(MODELS[family], CONFIGS[family])
    config = eagle_config(kind, target, **changes)
    tensors = eagle_tensors(kind, config, target.config, seed)
    return {"eagle": load_eagle(write_head(directory, config, tensors), target, OPS)}, tensors


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", ENGINES)
def test_answers_are_the_same(kind: str, family: str, settings: str, tmp_path: Path) -> None:
    """Greedy, sampled, grammars, n, log probabilities, penalties, prefix hits and preemption, in batches of 7 and 1."""
    config, count = CONFIGS[family], 27
    heads, _ = make_head(kind, family, tmp_path)
    kv_dtype = {name: value for name, value in ENGINES[settings].items() if name == "kv_dtype"}
    expected = run(make_engine(config, 32, kv_dtype), make_requests(11, count))
    for batch, proposers in ((7, []), (7, [SuffixProposer()]), (1, [])):
        engine, models = build_engine(
            config, MODELS[family], OPS, heads, list(proposers), max_requests=batch, **ENGINES[settings]
        )
        found = run(engine, make_requests(11, count))
        assert found == expected
        assert engine.controller is not None
        assert engine.controller.models == models, "the head failed"
        assert engine.controller.drafted["eagle"] > 50


@dataclass
class Recorder:
    """A head on its tapes that keeps what it computes."""

    inner: RecordedEagle
    computed: list[tuple[EagleRow, list[int], Tensor]] = field(default_factory=list)  # with the request's tokens
    drafted: list[tuple[EagleRow, list[int], Tensor]] = field(default_factory=list)

    def compute(self, rows: Sequence[EagleRow]) -> Any:
        return self._keep(self.computed, rows, self.inner.compute(rows))

    def draft(self, rows: Sequence[EagleRow]) -> Any:
        return self._keep(self.drafted, rows, self.inner.draft(rows))

    def _keep(self, calls: list[Any], rows: Sequence[EagleRow], outputs: Any) -> Any:
        first = 0
        for row in rows:
            own = outputs[0][first : first + len(row.tokens)]
            calls.append((replace(row), list(row.request.tokens), torch.from_numpy(own.copy())))
            first += len(row.tokens)
        return outputs


class PlainEagle:
    """EAGLE 1 and 3, and an MTP layer, in plain torch, one sequence at a time."""

    def __init__(self, tensors: dict[str, Any], config: EagleConfig, target: PlainTarget, rotary: Any) -> None:
        self.tensors = {name: torch.from_numpy(each) for name, each in tensors.items()}
        self.config = config
        self.target = target
        self.rotary = rotary

    def features(self, tokens: Sequence[int]) -> Tensor:
        """Those of the target's tokens, fused."""
        _, taps, final = self.target(tokens)
        if not self.config.tap_layers:
            return final
        return torch.cat([taps[layer] for layer in self.config.tap_layers], dim=1) @ self.tensors["fc.weight"].T

    def __call__(self, features: Tensor, tokens: Sequence[int], positions: Tensor) -> tuple[Tensor, Tensor]:
        """A chain: features [n, size] and the tokens after them -> states, following"""
        config, weights = self.config, self.tensors
        name, eps = config.layer, config.norm_eps
        embedded = rows_of(self.target.model.embedding, tokens)
        if config.kind == "mtp":
            pair = (
                rms(each, weights[f"{name}.{norm}_layernorm.weight"], eps)
                for each, norm in ((features, "hidden"), (embedded, "token"))
            )
            residual = torch.cat(tuple(pair), dim=1) @ weights[f"{name}.input_proj.weight"].T
            x = rms(residual, weights[f"{name}.input_layernorm.weight"], eps)
        elif config.kind == "eagle":
            x = residual = torch.cat((embedded, features), dim=1) @ weights["fc.weight"].T + weights["fc.bias"]
        else:
            normed = rms(features, weights[f"{name}.hidden_norm.weight"], eps)
            x = torch.cat((rms(embedded, weights[f"{name}.input_layernorm.weight"], eps), normed), dim=1)
            residual = normed if config.norm_residual else features
        q, k, v = (
            functional.linear(
                x,
                weights[f"{name}.self_attn.{letter}_proj.weight"],
                weights.get(f"{name}.self_attn.{letter}_proj.bias"),
            ).view(len(tokens), -1, config.head_dim)
            for letter in "qkv"
        )
        q, k = (rotate(each, self, positions) for each in (q, k))
        mask = torch.ones(len(tokens), len(tokens)).tril().bool()
        out = attend(q, k, v, mask, config.window).flatten(1)
        residual = residual + out @ weights[f"{name}.self_attn.o_proj.weight"].T
        x = rms(residual, weights[f"{name}.post_attention_layernorm.weight"], eps)
        gate, up = (x @ weights[f"{name}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        out = residual + (functional.silu(gate) * up) @ weights[f"{name}.mlp.down_proj.weight"].T
        if config.kind == "mtp":
            states = rms(out, weights[f"{name}.final_layernorm.weight"], eps)
            return states, states
        return (out if config.kind == "eagle" else rms(out, weights["norm.weight"], eps)), out

    def draft(self, tokens: Sequence[int], begin: int, drafts: Sequence[int]) -> Tensor:
        """The states of a request's last computed token and of a path of drafts, one autoregressive step after the
        other. The context begins at position `begin`."""
        features = self.features(tokens[:-1])[begin:]
        path = [*tokens[begin + 1 :], *drafts]
        positions = torch.arange(begin, begin + len(path))
        for count in range(len(features), len(path) + 1):
            states, following = self(features, path[:count], positions[:count])
            features = torch.cat((features, following[-1:]))
        return states[len(states) - len(drafts) - 1 :]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, window: int | None) -> Tensor:
    if window is not None:
        mask = mask & ~torch.ones_like(mask).tril(-window).bool()
    groups = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(groups, dim=1) for each in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * q.shape[2] ** -0.5
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


def record(proposer: Any) -> Recorder:
    assert isinstance(proposer, EagleProposer)
    recorder = Recorder(proposer._recorded)
    proposer._recorded = recorder  # type: ignore[assignment]
    return recorder


def questions(sampled: bool = False, count: int = 5) -> list[Request]:
    rng = random.Random(5)
    return [
        Request(
            f"{number}",
            [rng.randrange(5, 90) for _ in range(3 + 19 * number)],
            SamplingParams(temperature=0.9 if sampled else 0.0, max_tokens=None),
            seed=2**63 + number,
            max_tokens=14,
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("kind", [*KINDS, "normed residual"])
def test_states_are_those_of_plain_torch(kind: str, tmp_path: Path) -> None:
    """Prompts in chunks, accepted drafts, other requests in the batch, and trees of several steps."""
    config, model = CONFIGS["llama"], MODELS["llama"]
    changes = {"norm_before_residual": True} if kind == "normed residual" else {}
    heads, tensors = make_head("eagle3" if changes else kind, "llama", tmp_path, **changes)
    engine, (proposer,) = build_engine(config, model, OPS, heads, [SuffixProposer()], max_tokens=40)
    recorder = record(proposer)
    repeated = Request("again", [7, 8, 9, 10] * 6, SamplingParams(temperature=0.0, max_tokens=None), max_tokens=20)
    answer(engine, [*questions(), repeated])
    loaded = heads["eagle"]
    assert isinstance(loaded, LoadedEagle)
    plain = PlainEagle(tensors, loaded.head.config, PlainTarget(config, model), loaded.head.attention.rotary)
    tolerance = 0.3 if kind == "eagle" else 0.15  # rounding adds up: features, attention without norms, and steps
    last_rows = [call for call in recorder.computed if call[0].stop == len(call[1]) - 1]
    assert len(last_rows) > 30
    for row, tokens, states in last_rows[::5]:
        near(states[-1], plain.draft(tokens, row.begin, [])[-1], tolerance)
    for row, _, states in recorder.computed:
        if row.start == 0:  # from the same features
            features = torch.from_numpy(row.features)
            features = features @ plain.tensors["fc.weight"].T if loaded.head.config.tap_layers else features
            near(states, plain(features, list(row.tokens), torch.arange(len(row.tokens)))[0], 0.03)
    assert max(len(row.tokens) for row, _, _ in recorder.computed) > 30, "a long prompt"
    assert max(max(row.positions() - row.start) for row, _, _ in recorder.drafted) >= 2, "three depths"
    for row, tokens, states in recorder.drafted[::9]:
        tree = Drafts(list(row.tokens), list(row.parents or ()))
        for node in range(len(tree)):
            near(states[node], plain.draft(tokens, row.begin, tree.path_tokens(node))[-1], tolerance)


@pytest.mark.parametrize("kind", [*KINDS, "mtp"])
def test_the_network_runs_on_tensors_too(kind: str, tmp_path: Path) -> None:
    """The same class on torch's ops, as on a GPU."""
    path, tensors = make_mimo(tmp_path / "model")
    native, ops = load_model(path, dtype="float32", ops=OPS), select_torch("cpu")
    model = load_model(path, dtype="float32", ops=ops)
    target = Target(model.model, model.config)
    if kind == "mtp":
        loaded = load_mtp(path, target, ops)
    else:
        config = eagle_config(kind, target, **TWO_LAYERS[kind])
        tensors = eagle_tensors(kind, config, model.config)
        loaded = load_eagle(write_head(tmp_path / "head", config, tensors), target, ops)
    head, count = loaded.head, 7
    plain_rotary = (
        native.model.layers[0].attention.rotary
        if kind == "mtp"
        else RotaryTable(plain_frequencies(16, 10_000.0), max_len=128, interleaved=False, arrays=OPS.arrays)
    )
    plain = PlainEagle(tensors, head.config, PlainTarget(native.config, native.model), plain_rotary)
    features, tokens = torch.randn(count, head.config.num_features), [3, 9, 27, 81, 51, 57, 75]
    cache = LayerCache(*(torch.full((5, 4, 2, 16), torch.nan) for _ in range(2)), 0, 4)
    paging = Paging(
        torch.tensor([0, count]), torch.tensor([count]), [torch.tensor([[3, 1]])],
        [torch.tensor([12, 13, 14, 15, 4, 5, 6])], 4, [0, count], [count],
    )  # fmt: skip
    fused = head.fuse(features)
    expected = plain(fused.clone(), tokens, torch.arange(count))
    found = head(torch.tensor(tokens), fused, torch.arange(count), paging, cache)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "fp8"])
def test_a_node_has_the_bits_of_its_path_as_a_chain(kind: str, kv_dtype: str, tmp_path: Path) -> None:
    heads, _ = make_head(kind, "llama", tmp_path)
    engine, (proposer,) = build_engine(CONFIGS["llama"], MODELS["llama"], OPS, heads, kv_dtype=kv_dtype)
    recorder = record(proposer)
    num_branches = 0
    for request in questions():
        engine.add(request)
    while engine.has_work:
        engine.step()
        for row, _, states in recorder.drafted:
            tree = Drafts(list(row.tokens), list(row.parents or ()))
            num_branches += any(tree.parent(node) != node - 1 for node in range(len(tree)))
            for node in range(len(tree)):
                path = tree.path(node)
                chain = replace(row, tokens=[row.tokens[each] for each in path], features=row.features[path])
                found, _ = recorder.inner.draft([replace(chain, parents=None)])
                assert (found[-1] == states[node].numpy()).all()
        recorder.drafted.clear()
    assert num_branches > 20


def record_trees(proposer: Any) -> dict[tuple[int, ...], Tree]:
    """What a proposer proposes, by the request's id and tokens. It is asked for as many drafts each time."""
    trees: dict[tuple[int, ...], Tree] = {}
    propose = proposer.propose_requests

    def propose_requests(requests: Sequence[Request], max_drafts: Sequence[int]) -> list[Drafts | None]:
        found: list[Drafts | None] = propose(requests, [min(each, 1) * NUM_DRAFTS for each in max_drafts])
        for request, tree in zip(requests, found, strict=True):
            if tree is not None:
                trees[int(request.id), *request.tokens] = tree.tokens, tree.parents, tree.odds
        return found

    proposer.propose_requests = propose_requests
    return trees


def ask_sometimes(proposer: Any, seed: int) -> None:
    rng, propose = random.Random(seed), proposer.propose_requests
    proposer.propose_requests = lambda requests, limits: propose(
        requests, [limit if rng.random() < 0.2 else 0 for limit in limits]
    )


def propose_all(
    heads: dict[str, LoadedHead], requests: list[Request], prepare: Callable[[Any], None] = lambda proposer: None,
    **settings: Any,
) -> dict[tuple[int, ...], Tree]:  # fmt: skip
    engine, (proposer,) = build_engine(CONFIGS["llama"], MODELS["llama"], OPS, heads, **settings)
    trees = record_trees(proposer)
    prepare(proposer)
    answer(engine, requests)
    assert engine.controller is not None
    assert engine.controller.models == [proposer], "the head failed"
    return trees


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_drafts_depend_on_the_request_alone(kind: str, sampled: bool, tmp_path: Path) -> None:
    """Not on other requests, chunks, blocks, or when the head was asked before."""
    heads, _ = make_head(kind, "llama", tmp_path)
    expected = propose_all(heads, questions(sampled), max_requests=1)
    assert sum(len(tree[0]) for tree in expected.values()) > 150
    settings: list[dict[str, Any]] = [
        {"max_requests": 7},
        {"max_tokens": 11, "block_size": 3},
        {"prepare": lambda proposer: ask_sometimes(proposer, 1)},
        {"prepare": lambda proposer: ask_sometimes(proposer, 2), "block_size": 16},
    ]
    for each in settings:
        found = propose_all(heads, questions(sampled), **each)
        common = found.keys() & expected.keys()
        assert len(common) > 4
        assert {key: found[key] for key in common} == {key: expected[key] for key in common}, each


def test_a_prefix_that_an_earlier_request_had_computed_is_read(tmp_path: Path) -> None:
    heads, _ = make_head("own", "llama", tmp_path)
    engine, (proposer,) = build_engine(CONFIGS["llama"], MODELS["llama"], OPS, heads)
    trees, recorder = record_trees(proposer), record(proposer)
    prompt = [5 + token % 80 for token in range(43)]  # 10 blocks of 4 tokens and 3 tokens
    params = SamplingParams(temperature=0.0, max_tokens=None)
    first, second = (Request(name, prompt, params, max_tokens=20) for name in "12")
    answer(engine, [first])
    expected = {key[1:]: tree for key, tree in trees.items()}
    trees.clear()
    recorder.computed.clear()
    answer(engine, [second])
    assert recorder.computed[0][0].start >= 40
    assert all(row.begin == 0 for row, _, _ in recorder.computed)
    assert {key[1:]: tree for key, tree in trees.items()} == expected


def test_a_copied_block_keeps_its_keys(tmp_path: Path) -> None:
    """A prefix ends within a block that an earlier request has filled."""
    heads, _ = make_head("own", "llama", tmp_path)
    engine, (proposer,) = build_engine(CONFIGS["llama"], MODELS["llama"], OPS, heads, block_size=16)
    params = SamplingParams(temperature=0.0, max_tokens=None)
    prompt = [5 + token % 80 for token in range(70)]
    answer(engine, [Request("1", prompt, params, max_tokens=8)])
    recorder = record(proposer)
    answer(engine, [Request("2", [*prompt[:54], 3, 4, 5], params, max_tokens=8)])
    assert all(row.begin == 0 for row, _, _ in recorder.computed)
    positions = [position for row, _, _ in recorder.computed for position in row.positions().tolist()]
    assert positions == list(range(54, 54 + len(positions))), "each once, and none with the other request's keys"
    assert len(positions) > 6


def test_keys_that_are_missing_are_not_read(tmp_path: Path) -> None:
    """A prefix that was computed while the head was not asked, and lost states. Drafts begin at the next block."""
    heads, _ = make_head("own", "llama", tmp_path)
    engine, (proposer,) = build_engine(CONFIGS["llama"], MODELS["llama"], OPS, heads, block_size=8)
    assert isinstance(proposer, EagleProposer)
    params = SamplingParams(temperature=0.0, max_tokens=None)
    prompt = [5 + token % 80 for token in range(48)]
    controller, engine.controller = engine.controller, None
    answer(engine, [Request("1", prompt, params, max_tokens=1)])
    proposer.reset()
    engine.controller = controller
    recorder, trees = record(proposer), record_trees(proposer)
    second = Request("2", prompt, params, max_tokens=24)
    engine.add(second)
    while len(second.tokens) < 58:
        engine.step()
    assert {row.begin for row, _, _ in recorder.computed} == {48}
    assert min(row.start for row, _, _ in recorder.computed) == 48
    assert min(map(len, trees)) - 1 == 50
    proposer.states.reset()
    while engine.has_work:
        engine.step()
    assert {row.begin for row, _, _ in recorder.computed if row.start >= 58} == {64}


@pytest.mark.parametrize("settings", ["roomy", "few blocks", "swap"])
def test_only_filled_blocks_are_read(settings: str, tmp_path: Path) -> None:
    """Blocks without keys of the head hold values that are no numbers. No draft changes."""
    heads, _ = make_head("own", "llama", tmp_path)

    def poison(proposer: Any) -> None:
        cache, catch_up = proposer._recorded._cache, proposer.catch_up

        def spoil(requests: Sequence[Request]) -> None:
            for block in range(1, len(cache.k)):
                if not proposer.blocks.count(block):
                    cache.k[block] = cache.v[block] = np.nan
            catch_up(requests)

        proposer.catch_up = spoil

    def requests() -> list[Request]:
        chosen = make_requests(3, 20)
        for number, request in enumerate(chosen):
            request.id = str(number)
        return chosen

    expected, found = (
        propose_all(heads, requests(), prepare, max_requests=7, **ENGINES[settings])
        for prepare in (lambda proposer: None, poison)
    )
    assert found == expected
    assert sum(len(tree[0]) for tree in found.values()) > 100


@pytest.mark.parametrize("kind", KINDS)
def test_windows(kind: str, tmp_path: Path) -> None:
    """All layers have a window, and so has the head. Blocks behind it are freed before the head is asked."""
    config = replace(CONFIGS["llama"], family="mistral", windows=(12,) * 3)
    model = native_model(config, OPS, mixed)
    target = Target(model, config)
    described = eagle_config(kind, target)
    tensors = eagle_tensors(kind, described, config)
    heads: dict[str, LoadedHead] = {"eagle": load_eagle(write_head(tmp_path, described, tensors), target, OPS)}
    plain, _ = build_engine(config, model, OPS, {})
    expected = answer(plain, questions())
    for asked_seldom in (False, True):
        engine, (proposer,) = build_engine(config, model, OPS, heads)
        if asked_seldom:
            ask_sometimes(proposer, 3)
        recorder = record(proposer)
        assert answer(engine, questions()) == expected
        assert engine.controller is not None
        assert engine.controller.models == [proposer], "the head failed"
        assert any(row.begin for row, _, _ in recorder.drafted)
        loaded = heads["eagle"]
        assert isinstance(loaded, LoadedEagle)
        assert loaded.head.config.window == 12


def test_a_head_that_fails_is_dropped(tmp_path: Path) -> None:
    heads, _ = make_head("own", "llama", tmp_path)
    engine, (proposer,) = build_engine(CONFIGS["llama"], MODELS["llama"], OPS, heads)
    assert isinstance(proposer, EagleProposer)
    calls: list[int] = []

    def fail(rows: Sequence[EagleRow]) -> Any:
        calls.append(len(rows))
        raise RuntimeError("no drafts today")

    proposer._recorded.draft = fail  # type: ignore[method-assign]
    plain = make_engine(CONFIGS["llama"], 8, {})
    assert answer(engine, questions()) == answer(plain, questions())
    assert engine.controller is not None
    assert engine.controller.models == []
    assert len(calls) == 1
    assert proposer.states.num_bytes == 0, "nothing is kept for it"


class CopyingTensors:
    """Random weights of a model whose next token depends on its last one only: its layers add nothing."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def matrix(self, parts: Sequence[Part], cols: int) -> Any:
        weights = self.inner.matrix(parts, cols).dense().clone()
        (part,) = parts
        if "o_proj" in part.name or "down_proj" in part.name:
            weights.zero_()
        if "embed_tokens" in part.name:
            weights /= weights.square().mean(1, keepdim=True).sqrt()
        if "lm_head" in part.name:
            weights *= 5.0 / weights.norm(dim=1, keepdim=True)
        return Dense(weights)

    def vector(self, parts: Sequence[Part], *, plus_one: bool = False) -> Tensor:
        return torch.ones(sum(part.rows for part in parts))

    def scalar(self, value: float) -> Any:
        return value


def make_copying(directory: Path, noise: float) -> tuple[Any, dict[str, LoadedHead]]:
    """A model whose answers the head knows: its output is the embedding of the last token, with some noise."""
    config = replace(CONFIGS["llama"], tie_embeddings=False)
    assert OPS.native is not None
    source: Any = PanelSource(OPS.native, all_of("f32"))
    source.plain = CopyingTensors(source.plain)
    target = Target(FAMILIES["llama"](config, source, OPS), config)
    described = eagle_config("eagle", target)
    tensors = eagle_tensors("eagle", described, config)
    size = config.hidden_size
    rng = np.random.default_rng(1)
    tensors["fc.weight"] = np.concatenate((np.eye(size), np.zeros((size, size))), axis=1).astype(np.float32)
    tensors["fc.weight"][:, :size] += noise * rng.standard_normal((size, size)).astype(np.float32) / np.sqrt(size)
    tensors["fc.bias"] = np.zeros(size, np.float32)
    for name in ("layers.0.self_attn.o_proj.weight", "layers.0.mlp.down_proj.weight"):
        tensors[name] = np.zeros_like(tensors[name])
    return target.model, {"eagle": load_eagle(write_head(directory, described, tensors), target, OPS)}


@dataclass
class Verified:
    """What became of drafts."""

    num_right: int = 0
    num_wrong: int = 0  # places at which all drafts were wrong
    num_branches: int = 0  # accepted paths that left the trunk

    def add(self, plan: Plan, sampled: Sampled) -> None:
        for row, path in sampled.accepted.items():
            drafts, last = plan.drafts[row], path[-1] if path else ROOT
            self.num_right += len(path)
            self.num_wrong += any(drafts.parent(node) == last for node in range(len(drafts)))
            self.num_branches += path != list(range(len(path)))


def answer_copying(model: Any, heads: dict[str, LoadedHead], temperature: float) -> Verified:
    """Answers with the head are those without."""
    config = replace(CONFIGS["llama"], tie_embeddings=False)

    def requests() -> list[Request]:
        params = SamplingParams(temperature=temperature, max_tokens=None)
        return [Request(f"{number}", [9, 10 + number], params, seed=number, max_tokens=40) for number in range(6)]

    engine, models = build_engine(config, model, OPS, heads, block_size=5)
    plain, _ = build_engine(config, model, OPS, {})
    assert engine.controller is not None
    verified, observe = Verified(), engine.controller.observe

    def count(plan: Plan, sampled: Sampled) -> None:
        verified.add(plan, sampled)
        observe(plan, sampled)

    engine.controller.observe = count  # type: ignore[method-assign]
    assert answer(engine, requests()) == answer(plain, requests())
    assert engine.controller.models == models
    return verified


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_of_a_head_that_knows_the_answer_are_right(temperature: float, tmp_path: Path) -> None:
    """So depths, parents, positions and noise are those of the step that verifies them."""
    model, heads = make_copying(tmp_path, 0.0)
    verified = answer_copying(model, heads, temperature)
    assert verified.num_right > 140
    assert verified.num_wrong < 0.05 * verified.num_right


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_side_branches_are_accepted(temperature: float, tmp_path: Path) -> None:
    model, heads = make_copying(tmp_path, 0.7)
    verified = answer_copying(model, heads, temperature)
    assert verified.num_branches > 5
    assert verified.num_right > 60


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30, 0.0])
@pytest.mark.parametrize("part", ["post_attention_layernorm", "k_proj", "fc"])
def test_hostile_values_do_no_harm(kind: str, value: float, part: str, tmp_path: Path) -> None:
    target = Target(MODELS["llama"], CONFIGS["llama"])
    config = eagle_config(kind, target)
    tensors = eagle_tensors(kind, config, target.config)
    name = next(name for name in tensors if part in name)
    tensors[name][...] = value
    directory = write_head(tmp_path, config, tensors)
    if not math.isfinite(value) or (tensors[name].ndim == 2 and value == 1e30):  # too large for int8 with a scale
        with pytest.raises(BadModelFile, match="Train the head again"):
            load_eagle(directory, target, OPS)
        return
    engine, models = build_engine(CONFIGS["llama"], MODELS["llama"], OPS, {"eagle": load_eagle(directory, target, OPS)})
    plain = make_engine(CONFIGS["llama"], 8, {})
    assert answer(engine, questions()) == answer(plain, questions())
    assert engine.controller is not None
    assert engine.controller.models == models


def test_what_a_request_had_is_dropped_at_its_end(tmp_path: Path) -> None:
    heads, _ = make_head("own", "llama", tmp_path)
    engine, (proposer,) = build_engine(CONFIGS["llama"], MODELS["llama"], OPS, heads)
    assert isinstance(proposer, EagleProposer)
    requests = questions()
    for request in requests:
        engine.add(request)
    while not all(request.num_output > 3 for request in requests):
        engine.step()
    assert set(proposer.states._runs) == {request.id for request in requests}
    engine.abort("1")
    assert "1" not in proposer.states._runs
    assert engine.controller is not None
    engine.controller.reset()
    assert not proposer.states._runs
    assert not proposer.blocks._counts
    assert proposer.states.num_bytes == 0
    assert proposer.propose_requests([requests[0]], [4]) == [None]  # until its next steps
    answer(engine, [])
    answer(engine, [Request("short", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=None), max_tokens=1)])
    assert not proposer.states._runs
    assert proposer.states.num_bytes == 0


def test_states_are_bounded(tmp_path: Path) -> None:
    heads, _ = make_head("own", "llama", tmp_path)
    engine, (proposer,) = build_engine(CONFIGS["llama"], MODELS["llama"], OPS, heads, max_tokens=16)
    assert isinstance(proposer, EagleProposer)
    row_bytes = 3 * 4 * CONFIGS["llama"].hidden_size
    proposer.states._max_bytes = 40 * row_bytes
    requests, largest = questions(), 0
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
        largest = max(largest, proposer.states.num_bytes)
    assert 30 * row_bytes < largest <= 40 * row_bytes
    plain = make_engine(CONFIGS["llama"], 8, {})
    assert [request.tokens[request.num_prompt :] for request in requests] == answer(plain, questions())


def test_with_a_width_of_one_drafts_are_a_chain(tmp_path: Path) -> None:
    heads, _ = make_head("own", "llama", tmp_path)
    engine, (proposer,) = build_engine(CONFIGS["llama"], MODELS["llama"], OPS, heads)
    assert isinstance(proposer, EagleProposer)
    narrow = EagleProposer(
        "eagle", proposer._recorded, proposer._output, proposer._tap_indices, OPS, group=proposer._group, block_size=4,
        max_tokens=96, pool=lambda: engine.scheduler.kv.pool, reserve=engine.scheduler.reserve, width=1,
    )  # fmt: skip
    assert narrow.drafts_per_pass == 1
    engine.runner.listeners[:] = [narrow]  # type: ignore[attr-defined]
    assert engine.controller is not None
    engine.controller.models[:] = [narrow]
    trees = record_trees(narrow)
    assert answer(engine, questions()) == answer(make_engine(CONFIGS["llama"], 8, {}), questions())
    assert all(parents is None for tokens, parents, _ in trees.values() if tokens)
    assert max(len(tokens) for tokens, _, _ in trees.values()) > 2


def test_without_free_blocks_a_tree_is_flat(tmp_path: Path) -> None:
    heads, _ = make_head("own", "llama", tmp_path)
    engine, (proposer,) = build_engine(CONFIGS["llama"], MODELS["llama"], OPS, heads)
    assert isinstance(proposer, EagleProposer)
    request = questions()[1]
    engine.add(request)
    while request.num_output < 3:
        engine.step()
    (deep,) = proposer.propose_requests([request], [8])
    proposer._reserve = lambda request, count: 0
    (flat,) = proposer.propose_requests([request], [8])
    assert deep is not None
    assert flat is not None
    assert max(deep.depths()) > 1
    assert set(flat.depths()) == {1}
    proposer._reserve = lambda request, count: 1
    (cut,) = proposer.propose_requests([request], [8])
    assert cut is not None
    assert max(cut.depths()) == 2


TWO_LAYERS: dict[str, dict[str, Any]] = {
    "own": {"tap_layers": [0, 1, 1]},
    "eagle3": {"eagle_aux_hidden_state_layer_ids": [1, 1, 2], "eagle_config": None},
    "eagle": {},
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_with_a_head_from_its_configuration(kind: str, tmp_path: Path) -> None:
    path = tiny_directory(tmp_path / "model")
    options: dict[str, Any] = {"model": str(path), "device": "cpu", "num_blocks": 64, "max_requests": 4}
    plain = build(EngineConfig(kernels="native", speculate="off", **options), path)
    loaded = load_model(path, dtype="float32", ops=OPS)
    target, directory, block = Target(loaded.model, loaded.config), tmp_path / "head", tmp_path / "block"
    config = eagle_config(kind, target, **TWO_LAYERS[kind])
    write_head(directory, config, eagle_tensors(kind, config, target.config))
    other = block_config(target, kv_layers=[1])
    write_head(block, other, block_tensors(other, target.config))
    for speculate in (f"eagle:{directory}", f"block:{block},eagle:{directory}"):
        engine = build(EngineConfig(kernels="native", speculate=speculate, **options), path)
        assert engine.controller is not None
        models = list(engine.controller.models)
        assert models[-1].name == "eagle"
        engine.controller.times, engine.controller._clock = EqualTimes(12.0), lambda: 0.0

        def requests() -> list[Request]:
            params = SamplingParams(temperature=0.0, max_tokens=None)
            return [Request(f"{number}", [5, 6 + number, 7], params, max_tokens=40) for number in range(6)]

        assert answer(engine, requests()) == answer(plain, requests())
        assert engine.controller.models == models
        assert engine.controller.drafted["eagle"] > 20
    with pytest.raises(InvalidParams, match=r"eagle:.*CPU kernels"):
        build(EngineConfig(kernels="torch", speculate=f"eagle:{directory}", **options), path)


def test_heads_that_the_kernels_cannot_serve_are_refused(tmp_path: Path) -> None:
    path = tiny_directory(tmp_path / "model")
    loaded = load_model(path, dtype="float32", ops=OPS)
    target, directory = Target(loaded.model, loaded.config), tmp_path / "head"
    config = eagle_config("own", target, head_dim=24, tap_layers=[0, 1, 1])
    write_head(directory, config, eagle_tensors("own", config, target.config))
    with pytest.raises(UnsupportedModel, match="multiple of 16 dimensions, at most 512, and this head's have 24"):
        build(EngineConfig(model=str(path), device="cpu", kernels="native", speculate=f"eagle:{directory}"), path)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_the_best_candidates(kind: str, sampled: bool, tmp_path: Path) -> None:
    """The first drafts of two depths are the best of all tokens that can be drafted, by logit and noise."""
    heads, tensors = make_head(kind, "llama", tmp_path)
    engine, (proposer,) = build_engine(CONFIGS["llama"], MODELS["llama"], OPS, heads)
    requests = questions(sampled)
    for request in requests:
        engine.add(request)
    while not all(request.num_output > 3 for request in requests):
        engine.step()
    recorder = record(proposer)
    compared = 0
    for request, drafts in zip(requests, proposer.propose_requests(requests, [8] * len(requests)), strict=True):
        assert drafts is not None
        own = [call for call in recorder.computed if call[0].request is request]
        logits, ids = logits_of(kind, tensors, own[-1][2][-1], request)
        noise = [reference_noise(request, place)[ids] if sampled else torch.zeros(len(ids)) for place in range(2)]
        is_best(logits + 0.9 * noise[0], ids, drafts.tokens[0])
        for row, _, states in recorder.drafted:
            node = 0  # of the head's nodes the likeliest one is the first
            if row.request is request and drafts.tokens[0] == row.tokens[0]:
                children = [each for each in range(len(drafts)) if drafts.parent(each) == 0]
                if children:
                    logits, ids = logits_of(kind, tensors, states[node], request)
                    is_best(logits + 0.9 * noise[1], ids, drafts.tokens[children[0]])
                    compared += 1
    assert compared >= 3


def logits_of(kind: str, tensors: dict[str, Any], states: Tensor, request: Request) -> tuple[Tensor, Tensor]:
    """Log probabilities and ids of the tokens that can be drafted."""
    head = torch.from_numpy(MODELS["llama"].head.weight.dense())  # type: ignore[attr-defined]
    ids = torch.arange(VOCAB_SIZE)
    if kind == "own":
        known = tensors["draft_ids"].tolist()
        ids = torch.tensor(known + sorted(set(request.tokens) - set(known)))
    matrix = head[ids]
    if kind == "eagle3":
        ids = torch.from_numpy(np.flatnonzero(tensors["t2d"]))
        matrix = torch.from_numpy(tensors["lm_head.weight"])
    return (matrix @ states).log_softmax(0), ids


def reference_noise(request: Request, place: int) -> Tensor:
    return reference_gumbel(torch.tensor(signed(request.seed)), torch.tensor(len(request.tokens) + place), VOCAB_SIZE)


def is_best(scores: Tensor, ids: Tensor, token: int) -> None:
    assert scores[ids == token] > scores.max() - 0.3  # int8


def make_mimo(directory: Path) -> tuple[Path, dict[str, Any]]:
    """A tiny model with a layer for multi-token prediction, and the tensors of that layer."""
    config = tiny_config("mimo")
    tensors = mtp_tensors(config)
    weights = tiny_weights("mimo") | {name: torch.from_numpy(each) for name, each in tensors.items()}
    return write_directory(directory, config, weights), tensors


def test_an_mtp_layer_computes_what_plain_torch_does(tmp_path: Path) -> None:
    path, tensors = make_mimo(tmp_path)
    loaded = load_model(path, dtype="float32", ops=OPS)
    head = load_mtp(path, Target(loaded.model, loaded.config), OPS)
    engine, (proposer,) = build_engine(loaded.config, loaded.model, OPS, {"mtp": head})
    recorder = record(proposer)
    plain = PlainEagle(tensors, head.head.config, PlainTarget(loaded.config, loaded.model), head.head.attention.rotary)
    compared = 0
    params = SamplingParams(temperature=0.0, max_tokens=None)
    for number in range(8):  # so short that a prompt and the first draft are one pass
        engine.add(Request(f"{number}", list(range(number, 13 + 2 * number))[:14], params, max_tokens=12))
    while engine.has_work:
        recorder.computed.clear()
        recorder.drafted.clear()
        engine.step()
        for row, tokens, states in recorder.computed:
            if row.begin == row.start == 0:
                features = torch.from_numpy(row.features)
                near(states, plain(features, list(row.tokens), torch.arange(len(row.tokens)))[0], 0.03)
                if row.stop < len(tokens) - 1:
                    continue
                for drafted in [each for each in recorder.drafted if each[0].request is row.request]:
                    assert (drafted[0].features[0] == states[-1].numpy()).all(), "after the last norm"
                    assert drafted[1] == tokens
                    path_features = torch.cat((features, torch.from_numpy(drafted[0].features[:1])))
                    chain = [*row.tokens, drafted[0].tokens[0]]
                    near(drafted[2][0], plain(path_features, chain, torch.arange(len(chain)))[0][-1], 0.03)
                    compared += 1
    assert compared > 8


def test_an_engine_with_the_models_own_layer(tmp_path: Path) -> None:
    path, _ = make_mimo(tmp_path)
    options: dict[str, Any] = {"model": str(path), "device": "cpu", "num_blocks": 64, "max_requests": 4}
    plain = build(EngineConfig(kernels="native", speculate="off", **options), path)
    engine = build(EngineConfig(kernels="native", speculate="mtp", **options), path)
    assert engine.controller is not None
    (model,) = engine.controller.models
    assert model.name == "mtp"
    engine.controller.times, engine.controller._clock = EqualTimes(12.0), lambda: 0.0
    for request in (requests := questions(sampled=True)) + (others := questions(sampled=True)):
        request.tokens[:] = [token % 96 for token in request.tokens]
    assert answer(engine, requests) == answer(plain, others)
    assert engine.controller.models == [model]
    assert engine.controller.drafted["mtp"] > 20
    with pytest.raises(InvalidParams, match="speculate has mtp, and a draft head needs quire's own CPU kernels"):
        build(EngineConfig(kernels="torch", speculate="mtp", **options), path)
