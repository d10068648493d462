"""Self-speculation: drafts from the model's first layers and an exit. Answers are those of plain decoding, and a step
computes only the later layers of what was drafted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from quire.config import EngineConfig
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.build import build_engine as build
from quire.engine.engine import Engine
from quire.engine.self_draft import SelfDraft
from quire.engine.self_speculation import Exit
from quire.errors import InvalidParams, ModelNotFound
from quire.kernels.cpu.split import SplitModel
from quire.speculative.step_times import EqualTimes
from quire.speculative.suffix import SuffixProposer
from quire.weights.heads import Target
from quire.weights.loader import load_model
from tests.engine.test_heads import PlainTarget, dense, near, rms
from tests.engine.test_speculation import CONFIGS, ENGINES, MODELS, OPS, VOCAB_SIZE, make_engine, make_requests
from tests.tools.exits import (
    build_engine,
    exit_config,
    exit_tensors,
    identity_model,
    load_exit,
    right_tensors,
    untrained,
)
from tests.tools.heads import write_head
from tests.tools.oracle import run
from tests.tools.tiny_models import tiny_directory

pytestmark = pytest.mark.cpu


def make_exit(kind: str, family: str, directory: Path, layer: int = 1) -> Exit:
    if kind == "untrained":
        return untrained(layer)
    return load_exit(directory, Target(MODELS[family], CONFIGS[family]), OPS, layer=layer)


@pytest.fixture(autouse=True)
def always_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was right before: 4 drafts of each request in each step."""
    monkeypatch.setattr("quire.speculative.controller.choose_depth", lambda *_: 4)
    monkeypatch.setattr("quire.speculative.calibration.Calibration.chances", lambda _, source, odds, shift: list(odds))


def certain(drafter: SelfDraft | None) -> SelfDraft:
    """All its drafts are verified."""
    assert drafter is not None
    drafter._odds = lambda probability: 1.0
    return drafter


def count_first(model: SplitModel) -> list[int]:
    """The number of tokens of each pass of the first layers."""
    counts: list[int] = []
    first = model.first

    def run(tokens: Any, *arguments: Any) -> Any:
        counts.append(len(tokens))
        return first(tokens, *arguments)

    model.first = run  # type: ignore[method-assign]
    return counts


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("kind", ["untrained", "trained"])
@pytest.mark.parametrize("settings", ENGINES)
@pytest.mark.parametrize("batch", [1, 7])
def test_answers_are_the_same(kind: str, family: str, settings: str, batch: int, tmp_path: Path) -> None:
    """Greedy, sampled, grammars, n, log probabilities, penalties, prefix hits, preemption and swap."""
    config, count = CONFIGS[family], 27 if batch > 1 else 12
    found_exit = make_exit(kind, family, tmp_path)
    kv_dtype = {name: value for name, value in ENGINES[settings].items() if name == "kv_dtype"}
    expected = run(make_engine(config, 32, kv_dtype), make_requests(11, count))
    for proposers in ([], [SuffixProposer()]):
        engine, split, drafter = build_engine(
            config, MODELS[family], OPS, found_exit, proposers, max_requests=batch, **ENGINES[settings]
        )
        certain(drafter)
        passes, steps = count_first(split.model), Steps(split)
        assert run(engine, make_requests(11, count)) == expected
        assert engine.controller is not None
        assert engine.controller.models == [drafter], "the proposer failed"
        assert sum(passes) == steps.num_missing + steps.num_drafted
        if not proposers:
            assert engine.controller.drafted["self"] > 50
            assert steps.num_kept > 50


class Steps:
    """Counts tokens of steps whose states were kept, and others, and draft passes."""

    def __init__(self, split: Any) -> None:
        self.num_kept = self.num_missing = self.num_drafted = 0
        find, add = split._find_kept, split.kept.add

        def find_kept(plan: Any, batch: Any) -> Any:
            kept = find(plan, batch)
            self.num_kept += sum(map(len, kept))
            self.num_missing += plan.num_tokens - sum(map(len, kept))
            return kept

        def add_state(*arguments: Any) -> None:
            self.num_drafted += 1
            add(*arguments)

        run_split = split.run

        def run(*arguments: Any) -> Any:
            found = run_split(*arguments)
            assert not len(split.kept)
            return found

        split._find_kept, split.kept.add, split.run = find_kept, add_state, run


def questions(sampled: bool = False, count: int = 5, **params: Any) -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    requests = []
    for number in range(count):
        prompt = torch.randint(0, VOCAB_SIZE, (3 + 9 * number,), generator=generator).tolist()
        chosen = SamplingParams(temperature=0.9 if sampled else 0.0, max_tokens=None, **params)
        requests.append(Request(f"{number}", prompt, chosen, seed=2**63 + number, max_tokens=30))
    return requests


def answer(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return [request.tokens[request.num_prompt :] for request in requests]


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_an_exit_that_equals_the_model_is_always_right(family: str, sampled: bool, tmp_path: Path) -> None:
    config, layer = CONFIGS[family], 2
    model = identity_model(config, OPS, layer)
    target = Target(model, config)
    trained = load_exit(
        tmp_path, target, OPS, right_tensors(exit_config(target), target), layer=layer, rms_norm_eps=model.norm.eps
    )
    for found in (untrained(layer), trained):
        engine, _, drafter = build_engine(config, model, OPS, found)
        certain(drafter)
        requests = questions(sampled)
        answer(engine, requests)
        drafted, accepted = (sum(getattr(each, name) for each in requests) for name in ("num_drafted", "num_accepted"))
        assert accepted == drafted > 80
        assert engine.scheduler.counters.steps < 30


def record_calls(drafter: SelfDraft) -> list[tuple[list[int], Any]]:
    """The tokens before each call of the exit, drafts included, and its logits."""
    calls: list[tuple[list[int], Any]] = []
    inner = drafter._exit_logits

    class Recorder:
        finish, reset = inner.finish, inner.reset

        def __call__(self, states: Any, requests: Sequence[Request]) -> Any:
            logits = inner(states, requests)
            for request, row in zip(requests, logits, strict=True):
                calls.append((request.tokens[:-1] + drafter._kept._kept[request.id].tokens, row.copy()))
            return logits

    drafter._exit_logits = Recorder()  # type: ignore[assignment]
    return calls


@pytest.mark.parametrize("layer", [1, 2])
def test_logits_are_those_of_plain_torch(layer: int, tmp_path: Path) -> None:
    """A trained head and an untrained exit, with other requests in the batch and own tokens of each."""
    config, model = CONFIGS["llama"], MODELS["llama"]
    target, plain = Target(model, config), PlainTarget(config, model)
    arrays = exit_tensors(exit_config(target, layer=layer), config)
    tensors = {name: torch.from_numpy(each) for name, each in arrays.items()}
    for found in (untrained(layer), load_exit(tmp_path, target, OPS, arrays, layer=layer)):
        engine, _, drafter = build_engine(config, model, OPS, found)
        calls = record_calls(certain(drafter))
        answer(engine, questions())
        assert len(calls) > 30
        for tokens, logits in calls[::7]:
            x = plain(tokens)[1][layer - 1][-1]
            if found.head is None:
                expected = dense(model.head.weight) @ rms(x, torch.from_numpy(model.norm.weight), model.norm.eps)
                near(torch.from_numpy(logits), expected, 0.1)
                continue
            inner_state = tensors["adapter_down.weight"] @ rms(x, tensors["norm.weight"], 1e-5)
            y = x + tensors["adapter_up.weight"] @ functional.silu(inner_state)
            expected = dense(model.head.weight) @ rms(y, tensors["out_norm.weight"], 1e-5)
            drafted, finite = set(arrays["draft_ids"].tolist()), set(np.flatnonzero(np.isfinite(logits)).tolist())
            assert drafted <= finite <= drafted | set(tokens)
            ids = sorted(finite)
            near(torch.from_numpy(logits)[ids], expected[ids], 0.1)


@pytest.mark.parametrize("name", ["norm.weight", "out_norm.weight"])
@pytest.mark.parametrize("value", [3e38, -3e38, 1e30])
def test_a_head_that_gives_no_numbers_does_no_harm(name: str, value: float, tmp_path: Path) -> None:
    config, model = CONFIGS["llama"], MODELS["llama"]
    target = Target(model, config)
    tensors = exit_tensors(exit_config(target), config)
    tensors[name][...] = value
    engine, _, drafter = build_engine(config, model, OPS, load_exit(tmp_path, target, OPS, tensors))
    certain(drafter)
    assert answer(engine, questions()) == answer(make_engine(config, 8, {}), questions())
    assert engine.controller is not None
    assert engine.controller.models == [drafter]


def test_with_taps_of_other_heads_all_tokens_are_computed_again() -> None:
    config, model = CONFIGS["llama"], MODELS["llama"]
    engine, split, drafter = build_engine(config, model, OPS, untrained(2), tap_layers=(0, 2))
    certain(drafter)
    steps = Steps(split)
    assert answer(engine, questions()) == answer(make_engine(config, 8, {}), questions())
    assert not steps.num_kept
    assert steps.num_drafted


def test_an_engine_from_its_configuration(tmp_path: Path) -> None:
    path = tiny_directory(tmp_path / "model")
    options: dict[str, Any] = {"model": str(path), "device": "cpu", "num_blocks": 64, "max_requests": 4}
    loaded = load_model(path, dtype="float32", ops=OPS)
    target, directory = Target(loaded.model, loaded.config), tmp_path / "head"
    config = exit_config(target)
    write_head(directory, config, exit_tensors(config, target.config))

    def requests() -> list[Request]:
        params = SamplingParams(temperature=0.0, max_tokens=None)
        return [Request(f"{number}", [5, 6 + number, 7], params, max_tokens=40) for number in range(6)]

    plain = answer(build(EngineConfig(kernels="native", speculate="off", **options), path), requests())
    for value in ("1", str(directory)):
        engine = build(EngineConfig(kernels="native", speculate=f"self:{value}", **options), path)
        controller = engine.controller
        assert controller is not None
        assert [model.name for model in controller.models] == ["self"]
        controller.times, controller._clock = EqualTimes(12.0), lambda: 0.0
        assert answer(engine, requests()) == plain
        assert controller.drafted["self"] > 20
        with pytest.raises(InvalidParams, match=r"self:.*CPU kernels"):
            build(EngineConfig(kernels="torch", speculate=f"self:{value}", **options), path)
    for value, error, match in (
        ("0", InvalidParams, "has 2 layers; give from 1 to 1"),
        ("2", InvalidParams, "has 2 layers; give from 1 to 1"),
        (f"{directory}/none", ModelNotFound, "not a directory"),
        ("1,self:1", InvalidParams, "2 exits; give one"),
    ):
        with pytest.raises(error, match=match):
            build(EngineConfig(kernels="native", speculate=f"self:{value}", **options), path)
