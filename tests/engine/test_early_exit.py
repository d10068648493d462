"""Early exit: what a plain loop over the tokens gives, whatever the batch; neighbours and later requests are untouched;
and what the request asks for holds."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.config import EngineConfig
from quire.core.params import SamplingParams, StructuredOutputs
from quire.core.plan import Plan, Update
from quire.core.request import Finish, Request
from quire.engine.build import build_engine as build
from quire.engine.early_exit import FULL_EVERY, EarlyExit
from quire.engine.engine import Engine
from quire.engine.self_speculation import Exit
from quire.engine.split_steps import SplitSteps
from quire.errors import InvalidParams, ModelNotFound
from quire.models.decoder import Decoder
from quire.weights.heads import Target
from quire.weights.loader import load_model
from tests.engine.test_self_speculation import answer, questions
from tests.engine.test_speculation import (
    CONFIGS,
    ENGINES,
    MODELS,
    OPS,
    make_engine,
    make_requests,
)
from tests.tools.exits import build_engine, exit_config, exit_tensors, identity_model, load_exit, right_tensors
from tests.tools.heads import write_head
from tests.tools.oracle import Answer, run
from tests.tools.tiny import TinyEngine
from tests.tools.tiny_models import tiny_directory

pytestmark = pytest.mark.cpu

THRESHOLD = 0.55
CALIBRATION = [[0.05, 0.4], [0.3, 0.7], [0.8, 0.95]]  # the tiny model's exits are rarely sure


def make_exit(family: str, directory: Path, model: Decoder | None = None, **changes: Any) -> Exit:
    target = Target(model or MODELS[family], CONFIGS[family])
    return replace(load_exit(directory, target, OPS, layer=2, calibration=CALIBRATION, **changes), drafts=False)


def exiting(requests: Sequence[Request], threshold: float = THRESHOLD, share: float = 1.0) -> list[Request]:
    """The same requests, of which some may exit early. What is refused together is left out."""
    rng, changed = random.Random(3), list[Request]()
    for request in requests:
        is_plain = request.constraint is None and request.leader is None
        if is_plain and rng.random() < share:
            params = replace(request.params, logprobs=None, early_exit=threshold)
            request = Request(
                request.id, request.prompt, params, end_token_ids=request.end_token_ids, seed=request.seed,
                max_tokens=request.max_tokens, bad_word_ids=request.bad_word_ids,
            )  # fmt: skip
        changed.append(request)
    return [each for each in changed if each.leader is None]


@pytest.mark.parametrize("family", CONFIGS)
def test_the_answer_is_that_of_a_plain_loop(family: str, tmp_path: Path) -> None:
    """Each token from the whole context, computed anew: keys and values of tokens that exited are the model's own."""
    config, model = CONFIGS[family], MODELS[family]
    found = make_exit(family, tmp_path)
    engine, _, _ = build_engine(config, model, OPS, found)
    requests = exiting(questions(count=4))
    answers = answer(engine, requests)
    num_exited = 0
    for request, tokens in zip(requests, answers, strict=True):
        expected, exits = plain_loop(family, found, request)
        assert tokens == expected
        assert request.num_exited == len(exits)
        assert all(place % FULL_EVERY for place in exits)
        num_exited += len(exits)
    assert 20 < num_exited < sum(map(len, answers))
    assert engine.scheduler.counters.exited_tokens == num_exited


def plain_loop(family: str, found: Exit, request: Request) -> tuple[list[int], list[int]]:
    """Greedy tokens, and the lengths of the answer at which a token exited."""
    config, model = CONFIGS[family], MODELS[family]
    assert found.head is not None
    tokens, exits = list(request.prompt), list[int]()
    while len(tokens) - len(request.prompt) < request.max_tokens:
        engine, split, _ = build_engine(config, model, OPS, found, max_tokens=128)
        once = Request("once", tokens, SamplingParams(temperature=0.0, max_tokens=None), max_tokens=1)
        states: list[Any] = []
        run_split = split.run

        def keep(*arguments: Any, run_split: Any = run_split, states: Any = states) -> Any:
            states.append(run_split(*arguments).states.copy())
            return run_split(*arguments)

        split.run = keep  # type: ignore[method-assign]
        (full,) = answer(engine, [once])
        num_output = len(tokens) - len(request.prompt)
        next_token = full[0]
        if num_output % FULL_EVERY:
            once.tokens = list(tokens)
            assert split.early_exit is not None
            logits = split.early_exit.exit_logits(states[-1][-1:], [once])[0].astype(np.float64)
            probability = 1 / np.exp(logits - logits.max()).sum()
            if found.head.calibration.confidence(probability) >= THRESHOLD:
                next_token = int(logits.argmax())
                exits.append(num_output)
        tokens.append(next_token)
    return tokens[len(request.prompt) :], exits


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("settings", ENGINES)
def test_answers_do_not_depend_on_the_batch(family: str, settings: str, tmp_path: Path) -> None:
    """Greedy, sampled, penalties, bans, prefix hits, preemption and swap, alone and with neighbours of all kinds."""
    config, found = CONFIGS[family], make_exit(family, tmp_path)
    kv_dtype = {name: value for name, value in ENGINES[settings].items() if name == "kv_dtype"}

    def run_batch(batch: int, **changes: Any) -> tuple[dict[str, Answer], list[Request]]:
        engine, _, _ = build_engine(config, MODELS[family], OPS, found, max_requests=batch, **changes)
        requests = exiting(make_requests(23, 36))
        return run(engine, requests), requests

    expected, requests = run_batch(1, **kv_dtype)
    assert sum(request.num_exited for request in requests) > 30
    for batch in (7, 32):
        found_answers, others = run_batch(batch, **ENGINES[settings])
        assert found_answers == expected
        assert [each.num_exited for each in others] == [each.num_exited for each in requests]


@pytest.mark.parametrize("family", CONFIGS)
def test_neighbours_have_the_same_bits(family: str, tmp_path: Path) -> None:
    config, found = CONFIGS[family], make_exit(family, tmp_path)
    plain = run(make_engine(config, 32, {}), make_requests(11, 36))
    exited: list[dict[str, Answer]] = []
    for drafts in (False, True):
        engine, _, _ = build_engine(config, MODELS[family], OPS, replace(found, drafts=drafts), max_requests=9)
        requests = exiting(make_requests(11, 36), share=0.5)
        answers = run(engine, requests)
        neighbours = [each.id for each in requests if each.params.early_exit is None]
        assert len(neighbours) > 8
        assert {name: answers[name] for name in neighbours} == {name: plain[name] for name in neighbours}
        assert sum(each.num_exited for each in requests) > 20
        exited.append({name: answers[name] for name in answers if name not in neighbours})
        assert not any(each.num_drafted for each in requests if each.id not in neighbours)
    assert exited[0] == exited[1]


def check_waiting(split: SplitSteps) -> None:
    """Few tokens wait for their later layers, none of a prompt."""
    run_split = split.run

    def checked(plan: Plan, *arguments: Any) -> Any:
        found = run_split(plan, *arguments)
        for row in found.waiting:
            assert plan.counts[row] <= FULL_EVERY
            assert plan.starts[row] >= plan.requests[row].num_prompt
        return found

    split.run = checked  # type: ignore[method-assign]


def test_preemption_at_random_moments_changes_nothing(tmp_path: Path) -> None:
    config, found = CONFIGS["llama"], make_exit("llama", tmp_path)

    def make(num_host_blocks: int) -> tuple[TinyEngine, Engine]:
        tiny = TinyEngine(
            config, model=MODELS["llama"], ops=OPS, max_requests=8, max_tokens=96, num_host_blocks=num_host_blocks
        )
        engine, split, _ = build_engine(
            config, MODELS["llama"], OPS, found, max_requests=8, num_host_blocks=num_host_blocks
        )
        tiny.scheduler, tiny.runner = engine.scheduler, engine.runner  # type: ignore[assignment]
        check_waiting(split)
        return tiny, engine

    requests = exiting(questions())
    expected = make(0)[0].answer(requests)
    for num_host_blocks in (0, 200):
        for seed in range(4):
            tiny, engine = make(num_host_blocks)
            others = exiting(questions())
            assert tiny.answer_preempted(others, seed) == expected
            assert engine.scheduler.counters.preemptions
            assert [each.num_exited for each in others] == [each.num_exited for each in requests]


def test_a_request_goes_on_after_a_restart(tmp_path: Path) -> None:
    """A new engine gets the tokens that there are. What exits does not depend on that."""
    config, found = CONFIGS["llama"], make_exit("llama", tmp_path)

    def make(output: Sequence[int] = ()) -> Request:
        (request,) = exiting(questions(True, count=1))
        params = replace(request.params, presence_penalty=0.5)
        return Request(
            "one", request.prompt, params, seed=request.seed, max_tokens=request.max_tokens, output=output
        )  # fmt: skip

    whole = make()
    (expected,) = answer(build_engine(config, MODELS["llama"], OPS, found)[0], [whole])
    assert whole.num_exited > 5
    for count in range(1, len(expected)):
        assert answer(build_engine(config, MODELS["llama"], OPS, found)[0], [make(expected[:count])]) == [expected]


def test_a_later_request_may_have_the_same_id(tmp_path: Path) -> None:
    """What the exit knew of the first one's tokens does not stay."""
    config, found = CONFIGS["llama"], make_exit("llama", tmp_path)
    engine, _, _ = build_engine(config, MODELS["llama"], OPS, found)
    short, *_, long = exiting(questions())
    answer(engine, [Request("same", short.prompt, short.params, max_tokens=5)])
    again, fresh = (Request("same", long.prompt, long.params, max_tokens=30) for _ in range(2))
    assert answer(engine, [again]) == answer(build_engine(config, MODELS["llama"], OPS, found)[0], [fresh])
    assert again.num_exited == fresh.num_exited > 3


def test_nothing_is_kept_for_a_request_that_has_ended(tmp_path: Path) -> None:
    """Its own tokens' rows of the head are freed, whether it ends or is aborted, also without self-speculation."""
    config, found = CONFIGS["llama"], make_exit("llama", tmp_path)
    engine, split, _ = build_engine(config, MODELS["llama"], OPS, found)
    assert split.early_exit is not None
    own = split.early_exit.exit_logits._vocabulary._own  # type: ignore[union-attr]
    first, second, *_ = exiting(questions())
    engine.add(first)
    while first.num_exited < 3:
        engine.step()
    assert list(own) == [first.id]
    answer(engine, [second])
    assert second.id not in own
    engine.add(third := Request("third", first.prompt, first.params, max_tokens=30))
    while third.num_exited < 3:
        engine.step()
    assert "third" in own
    engine.abort("third")
    assert not len(own)
    assert not len(split.kept)


def test_later_requests_read_nothing_that_is_not_computed(tmp_path: Path) -> None:
    """The blocks of an answer with early exit are found by a request that goes on from it."""
    config, found = CONFIGS["llama"], make_exit("llama", tmp_path)
    engine, _, _ = build_engine(config, MODELS["llama"], OPS, found)
    (first,) = exiting(questions(count=1))
    answer(engine, [first])
    assert first.num_exited > 5
    for end in range(first.num_prompt, len(first.tokens)):
        prompt = first.tokens[: end + 1]
        params = SamplingParams(temperature=0.0, max_tokens=None, logprobs=2)
        again, fresh = (Request("again", prompt, params, max_tokens=4) for _ in range(2))
        found_answer = run(engine, [again])
        assert found_answer == run(make_engine(config, 8, {}), [fresh])
    assert engine.scheduler.counters.cached_tokens > 100


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", CONFIGS)
def test_an_exit_that_equals_the_model_gives_its_answer(family: str, sampled: bool, tmp_path: Path) -> None:
    config, model = CONFIGS[family], identity_model(CONFIGS[family], OPS, 2)
    target = Target(model, config)
    tensors = right_tensors(exit_config(target), target)
    found = load_exit(tmp_path, target, OPS, tensors, layer=2, rms_norm_eps=model.norm.eps, calibration=[[0.0, 1.0]])
    found = replace(found, drafts=False)
    engine, _, _ = build_engine(config, model, OPS, found)
    plain, _, _ = build_engine(config, model, OPS, found)
    requests = exiting(questions(sampled), 0.99)
    assert answer(engine, requests) == answer(plain, questions(sampled))
    assert all(each.num_exited == each.num_output - 1 - each.num_output // FULL_EVERY for each in requests)


def record_judgements(early_exit: EarlyExit) -> list[tuple[float, bool]]:
    """Each confidence, by the table that was written, and whether it sufficed."""
    judged: list[tuple[float, bool]] = []
    is_confident, (xs, ys) = early_exit.is_confident, zip(*[[0.0, 0.0], *CALIBRATION], strict=True)

    def judge(request: Request, probability: float) -> bool:
        passes = is_confident(request, probability)
        judged.append((float(np.interp(probability, xs, ys)), passes))
        return passes

    early_exit.is_confident = judge  # type: ignore[method-assign]
    return judged


def test_the_threshold_is_honoured(tmp_path: Path) -> None:
    """Fewer tokens exit with a higher one, each with at least that confidence; none above all agreements."""
    config, counts = CONFIGS["llama"], []
    for threshold in (0.42, THRESHOLD, 0.75, 0.951):
        engine, split, _ = build_engine(config, MODELS["llama"], OPS, make_exit("llama", tmp_path))
        assert split.early_exit is not None
        judged = record_judgements(split.early_exit)
        requests = exiting(questions(), threshold)
        answers = answer(engine, requests)
        assert all(passes == (confidence >= threshold) for confidence, passes in judged)
        counts.append(sum(each.num_exited for each in requests))
        assert counts[-1] == sum(passes for _, passes in judged)
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[2]
    assert counts[-1] == 0
    assert answers == answer(make_engine(config, 8, {}), questions())


def test_what_a_request_asks_for_holds_for_tokens_that_exit(tmp_path: Path) -> None:
    """With a threshold that every token passes."""
    config = CONFIGS["llama"]
    found = make_exit("llama", tmp_path)

    def ask(seed: int = 0, bad: Sequence[Sequence[int]] = (), max_tokens: int = 30, **params: Any) -> Request:
        engine, _, _ = build_engine(config, MODELS["llama"], OPS, found)
        chosen = SamplingParams(**{"temperature": 1.0, "max_tokens": None, "early_exit": 1e-6, **params})
        request = Request(
            "one", [5, 6, 7, 8], chosen, seed=seed, max_tokens=max_tokens, end_token_ids=frozenset([3]),
            bad_word_ids=tuple(map(tuple, bad)),
        )  # fmt: skip
        updates: list[Update] = []
        engine.add(request)
        while engine.has_work:
            updates += engine.step()
        (finish,) = [update.finish for update in updates if update.finish]
        assert finish is (Finish.LENGTH if request.num_output == max_tokens else Finish.STOP)
        assert sum(update.detail.num_exited for update in updates if update.detail) == request.num_exited
        return request

    plain = ask()
    output = plain.tokens[4:]
    assert plain.num_exited == 26
    assert ask(logit_bias={17: 100.0}).tokens[5:] == [17] * 29
    assert 17 not in ask(bad=[[17]], logit_bias={17: 100.0}).tokens[5:]
    assert set(ask(allowed_token_ids=[21, 22]).tokens[4:]) == {21, 22}
    stopped = ask(stop_token_ids=[output[9]])
    assert stopped.tokens[4:] == output[: output.index(output[9]) + 1]
    assert ask(max_tokens=11).tokens[4:] == output[:11]
    late = ask(stop_token_ids=list(range(20, 200)), min_tokens=20)
    assert late.num_output >= 20
    assert not set(range(20, 200)) & set(late.tokens[4:23])
    unlike = ask(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=5.0).tokens[5:]
    assert len(set(unlike)) > len(set(ask(temperature=0.0).tokens[5:]))
    assert ask(seed=1).tokens != plain.tokens


@pytest.mark.parametrize("name", ["norm.weight", "out_norm.weight"])
@pytest.mark.parametrize("value", [3e38, -3e38])
def test_a_head_that_gives_no_numbers_lets_nothing_exit(name: str, value: float, tmp_path: Path) -> None:
    config, target = CONFIGS["llama"], Target(MODELS["llama"], CONFIGS["llama"])
    tensors = exit_tensors(exit_config(target), config)
    tensors[name][...] = value
    engine, _, _ = build_engine(config, MODELS["llama"], OPS, load_exit(tmp_path, target, OPS, tensors))
    requests = exiting(questions(), 1e-6)
    assert answer(engine, requests) == answer(make_engine(config, 8, {}), questions())
    assert not any(each.num_exited for each in requests)


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"early_exit": 0.0}, "above 0"),
        ({"early_exit": 1.0}, "no exit is sure"),
        ({"early_exit": math.nan}, "give a number"),
        ({"early_exit": True}, "give a number"),
        ({"early_exit": "0.9"}, "give a number"),
        ({"early_exit": 0.9, "logprobs": 0}, "log probabilities"),
        ({"early_exit": 0.9, "structured_outputs": StructuredOutputs(regex="a+")}, "grammar"),
        ({"early_exit": 0.9, "use_beam_search": True, "temperature": 0.0}, "beam search"),
        ({"early_exit": 0.9, "prediction": "text"}, "drafted"),
    ],
)
def test_what_is_refused(params: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidParams, match=match):
        SamplingParams(**params)


def test_an_engine_from_its_configuration(tmp_path: Path) -> None:
    path = tiny_directory(tmp_path / "model")
    options: dict[str, Any] = {"model": str(path), "device": "cpu", "num_blocks": 64, "max_requests": 4}
    loaded = load_model(path, dtype="float32", ops=OPS)
    target, directory = Target(loaded.model, loaded.config), tmp_path / "head"
    config = exit_config(target)
    write_head(directory, config, exit_tensors(config, target.config))
    params = SamplingParams(temperature=0.0, early_exit=1e-6)
    for speculate in ("auto", "off", f"self:{directory}"):
        engine = build(EngineConfig(kernels="native", exit_head=str(directory), speculate=speculate, **options), path)
        request = Request("one", [5, 6, 7], params, max_tokens=30)
        answer(engine, [request])
        assert request.num_exited > 10
    for speculate in ("auto", "self:1", f"self:{directory}"):
        engine = build(EngineConfig(kernels="native", speculate=speculate, **options), path)
        with pytest.raises(InvalidParams, match=r"no exit head.*--exit-head"):
            engine.add(Request("one", [5, 6, 7], params, max_tokens=30))
        assert not engine.has_work
    other = tmp_path / "other"
    write_head(other, config, exit_tensors(config, target.config, seed=1))
    for changes, error, match in (
        ({"exact": True}, InvalidParams, "exit_head and exact"),
        ({"kernels": "torch"}, InvalidParams, "CPU kernels"),
        ({"speculate": "self:1"}, InvalidParams, "same head"),
        ({"speculate": f"self:{other}"}, InvalidParams, "same head"),
        ({"exit_head": ""}, InvalidParams, "give the directory"),
        ({"exit_head": "1"}, ModelNotFound, "not a directory"),
    ):
        with pytest.raises(error, match=match):
            build(EngineConfig.of({"kernels": "native", "exit_head": str(directory), **options, **changes}), path)
