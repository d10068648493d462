"""Beam search in the engine against a plain one that computes every beam from its first token, on tiny models."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from quire.core.constraint import Constraint
from quire.core.params import SamplingParams
from quire.core.plan import Hypothesis, Update
from quire.core.request import Finish, Request
from quire.errors import InvalidParams, PromptTooLong
from tests.tools.tiny import FAMILIES, TinyEngine, tiny_model

pytestmark = pytest.mark.cpu

VOCABULARY = 97
MODELS = {family: tiny_model(config) for family, config in FAMILIES.items()}
Logprobs = Callable[[Sequence[int]], list[float]]  # of every token that may follow


@dataclass(frozen=True)
class Found:
    tokens: list[int]
    cum_logprob: float
    score: float


def plain_beam_search(
    prompt: list[int],
    logprobs: Logprobs,
    ends: frozenset[int],
    *,
    width: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    allowed: Callable[[list[int]], set[int]] | None = None,
    is_stopped: Callable[[list[int]], bool] = lambda tokens: False,
) -> list[Found]:
    """Hugging Face's rules, written down once more without an engine."""
    live: list[tuple[list[int], float]] = [([], 0.0)]
    finished: list[Found] = []
    for length in range(1, max_tokens + 1):
        grown = []
        for tokens, total in live:
            every = logprobs([*prompt, *tokens])
            may = range(len(every)) if allowed is None else sorted(allowed(tokens))
            grown += [([*tokens, token], total + every[token]) for token in may]
        grown.sort(key=lambda each: -each[1])
        live = []
        for rank, (tokens, total) in enumerate(grown[: width * max(2, 1 + len(ends))]):
            if tokens[-1] in ends or is_stopped(tokens) or length == max_tokens:
                if rank < width:
                    finished.append(Found(tokens, total, total / length**length_penalty))
            elif len(live) < width:
                live.append((tokens, total))
        finished = sorted(finished, key=lambda each: -each.score)[:width]
        if not live:
            break
        if len(finished) == width:
            reach = max_tokens if early_stopping == "never" and length_penalty > 0 else length
            if early_stopping is True or finished[-1].score >= live[0][1] / reach**length_penalty:
                break
    return finished


def full_logprobs(family: str) -> Logprobs:
    """By an engine that has nothing in its cache, for each sequence anew."""
    known: dict[tuple[int, ...], list[float]] = {}

    def compute(tokens: Sequence[int]) -> list[float]:
        if (key := tuple(tokens)) not in known:
            engine = TinyEngine(FAMILIES[family], model=MODELS[family], prefix_cache=False, max_tokens=256)
            request = Request("r", list(tokens), SamplingParams(logprobs=VOCABULARY, temperature=0.0), max_tokens=1)
            engine.scheduler.add(request)
            plan = engine.scheduler.schedule()
            assert plan is not None
            (position,) = engine.runner.launch(plan).wait().logprobs[0]
            by_token = {token: logprob for token, logprob, _ in position.top}
            known[key] = [by_token[token] for token in range(VOCABULARY)]
        return known[key]

    return compute


FULL = {family: full_logprobs(family) for family in FAMILIES}


def beam_request(prompt: list[int], width: int, max_tokens: int, name: str = "r", **more: Any) -> Request:
    ends, constraint = more.pop("ends", frozenset()), more.pop("constraint", None)
    stop_matcher = more.pop("stop_matcher", None)
    params = SamplingParams(use_beam_search=True, **{"temperature": 0.0, "n": width, "max_tokens": None, **more})
    return Request(
        name, prompt, params, end_token_ids=ends, max_tokens=max_tokens, constraint=constraint,
        stop_matcher=stop_matcher,
    )  # fmt: skip


def run(engine: TinyEngine, requests: Sequence[Request], seed: int | None = None) -> dict[str, Update]:
    """Their last updates. With a seed, requests are thrown out at random moments."""
    rng, last = random.Random(seed), dict[str, Update]()
    for request in requests:
        engine.scheduler.add(request)
    while engine.scheduler.has_work:
        plan = engine.scheduler.schedule()
        if plan is not None:
            for update in engine.scheduler.commit(plan, engine.runner.launch(plan).wait()):
                if update.finish:
                    last[update.id] = update
        if seed is not None and engine.scheduler.running and rng.random() < 0.5:
            engine.scheduler._preempt(rng.choice(engine.scheduler.running))
    assert engine.scheduler.kv.pool.num_free == engine.scheduler.kv.pool.num_blocks
    assert not engine.scheduler._beam_groups
    return last


def answers(update: Update) -> list[Hypothesis]:
    assert update.detail is not None
    assert update.detail.beams is not None
    return update.detail.beams


def assert_same(found: list[Hypothesis], expected: list[Found]) -> None:
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    assert [each.cum_logprob for each in found] == pytest.approx([each.cum_logprob for each in expected], abs=1e-5)
    assert [each.score for each in found] == pytest.approx([each.score for each in expected], rel=1e-5)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


def engine_of(family: str = "llama", **more: Any) -> TinyEngine:
    return TinyEngine(FAMILIES[family], model=MODELS[family], **{"max_tokens": 64, **more})


def likely_ends(prompt: list[int], count: int, family: str = "llama") -> frozenset[int]:
    """Tokens that come early in a search, so that some beams end and others go on."""
    found = plain_beam_search(prompt, FULL[family], frozenset(), width=4, max_tokens=6)
    return frozenset(found[nth % 4].tokens[2 + nth] for nth in range(count))


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.5])
@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_it_finds_what_a_plain_search_finds(width: int, length_penalty: float, early_stopping: bool | str) -> None:
    for seed in range(3):
        prompt = prompt_of(7 + 3 * seed, seed)
        ends = likely_ends(prompt, 1 + seed)
        options: dict[str, Any] = {"length_penalty": length_penalty, "early_stopping": early_stopping}
        expected = plain_beam_search(prompt, FULL["llama"], ends, width=width, max_tokens=9, **options)
        update = run(engine_of(), [beam_request(prompt, width, 9, ends=ends, **options)])["r"]
        assert_same(answers(update), expected)
        assert update.finish == (Finish.STOP if expected[0].tokens[-1] in ends else Finish.LENGTH)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_small_blocks_and_chunks(family: str) -> None:
    prompt = prompt_of(18)
    expected = plain_beam_search(prompt, FULL[family], likely_ends(prompt, 1, family), width=3, max_tokens=14)
    for more in ({"block_size": 1, "num_blocks": 512}, {"max_tokens": 5, "max_requests": 5}, {"prefix_cache": False}):
        request = beam_request(prompt, 3, 14, ends=likely_ends(prompt, 1, family))
        assert_same(answers(run(engine_of(family, **more), [request])["r"]), expected)


def test_a_width_of_one_is_greedy() -> None:
    prompt = prompt_of(9)
    greedy = Request("g", prompt, SamplingParams(temperature=0.0), max_tokens=12)
    tokens = engine_of().answer([greedy])[0]
    assert answers(run(engine_of(), [beam_request(prompt, 1, 12)])["r"])[0].tokens == tokens


@pytest.mark.parametrize(("width", "length", "steps"), [(4, 33, 20), (8, 10, 5), (1, 5, 5)])
def test_a_search_computes_the_prompt_once_and_a_token_a_beam_and_step(width: int, length: int, steps: int) -> None:
    engine = engine_of(max_tokens=512)
    run(engine, [beam_request(prompt_of(length), width, steps)])
    assert engine.scheduler.counters.computed_tokens == length + width * (steps - 1)
    assert engine.scheduler.counters.steps == steps


def test_beams_share_blocks() -> None:
    """Full blocks of the prompt are held once, whatever the width."""
    engine = engine_of(max_tokens=512)
    engine.scheduler.add(beam_request(prompt_of(40), 8, 4))
    engine.step()
    engine.step()
    assert engine.scheduler.schedule() is not None
    pool = engine.scheduler.kv.pool
    assert pool.num_blocks - pool.num_free == 10 + 8


# ── with neighbours, and when there is too little room ────────────────────────────────────────────────────────────


def searches(family: str) -> tuple[list[Request], dict[str, list[Found]]]:
    requests, expected = [], {}
    for number in range(5):
        prompt, width, length = prompt_of(5 + 6 * number, number), 1 + number % 4, 6 + 2 * number
        ends = likely_ends(prompt, 1, family)
        requests.append(beam_request(prompt, width, length, str(number), ends=ends))
        expected[str(number)] = plain_beam_search(prompt, FULL[family], ends, width=width, max_tokens=length)
    return requests, expected


def neighbours() -> list[Request]:
    return [
        Request(f"n{number}", prompt_of(8, number), SamplingParams(temperature=1.0), seed=number, max_tokens=20)
        for number in range(6)
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"max_tokens": 9, "max_requests": 7},
        {"num_blocks": 40, "max_tokens": 24, "max_requests": 12},
        {"num_blocks": 40, "max_tokens": 24, "max_requests": 12, "prefix_cache": False},
        {"num_blocks": 40, "max_tokens": 24, "max_requests": 12, "prefix_cache": False, "num_host_blocks": 100},
    ],
    ids=["roomy", "chunks", "tiny cache", "no prefix cache", "swap"],
)
def test_searches_and_neighbours_do_not_disturb_each_other(family: str, more: dict[str, Any]) -> None:
    num_groups = len({*FAMILIES[family].windows})
    options = more | ({"num_blocks": more["num_blocks"] * num_groups} if "num_blocks" in more else {})
    requests, expected = searches(family)
    alone = [engine_of(family).answer([request])[0] for request in neighbours()]
    beside = neighbours()
    engine = engine_of(family, **options)
    mixed = [request for pair in zip(requests, beside, strict=False) for request in pair] + beside[len(requests) :]
    found = run(engine, mixed)
    for name, beams in expected.items():
        assert_same(answers(found[name]), beams)
    assert [request.tokens[request.num_prompt :] for request in beside] == alone


@pytest.mark.parametrize(("width", "num_blocks"), [(3, 14), (3, 20), (4, 14), (4, 20), (5, 17)])
def test_beams_that_are_swapped_out_while_a_block_is_copied_for_them(width: int, num_blocks: int) -> None:
    """A step swaps out before it copies: a beam's new block is still empty then."""
    prompts = [prompt_of(4 + number % 5, number) for number in range(10)]
    requests = [beam_request(prompt, width, 8, str(number)) for number, prompt in enumerate(prompts)]
    engine = engine_of(num_blocks=num_blocks, max_tokens=24, max_requests=12, prefix_cache=False, num_host_blocks=200)
    found = run(engine, requests)
    assert engine.scheduler.counters.swaps > 3
    for number, prompt in enumerate(prompts):
        expected = plain_beam_search(prompt, FULL["llama"], frozenset(), width=width, max_tokens=8)
        assert_same(answers(found[str(number)]), expected)


@pytest.mark.parametrize("num_host_blocks", [0, 200])
@pytest.mark.parametrize("family", FAMILIES)
def test_preempted_at_random_moments(family: str, num_host_blocks: int) -> None:
    for seed in range(3):
        requests, expected = searches(family)
        engine = engine_of(
            family, prefix_cache=not num_host_blocks, num_host_blocks=num_host_blocks, max_requests=12, max_tokens=24
        )
        found = run(engine, [*requests, *neighbours()], seed=seed)
        for name, beams in expected.items():
            assert_same(answers(found[name]), beams)
        assert engine.scheduler.counters.preemptions > 3
        assert engine.scheduler.swap.num_free == num_host_blocks
        assert bool(engine.scheduler.counters.swaps) == bool(num_host_blocks)


def test_after_an_interruption_the_search_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(11)
    expected = plain_beam_search(prompt, FULL["llama"], frozenset(), width=3, max_tokens=8)
    engine = engine_of()
    engine.scheduler.add(beam_request(prompt, 3, 8))
    for _ in range(4):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "_drop_beams", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.scheduler.reset()
    engine.runner.reset()
    assert engine.scheduler.kv.pool.num_free == engine.scheduler.kv.pool.num_blocks
    updates: list[Update] = []
    while engine.scheduler.has_work and (plan := engine.scheduler.schedule()):
        updates += engine.scheduler.commit(plan, engine.runner.launch(plan).wait())
    assert_same(answers(updates[-1]), expected)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_search_ends_when_it_is_aborted() -> None:
    engine = engine_of()
    engine.scheduler.add(beam_request(prompt_of(11), 4, 8))
    for _ in range(3):
        engine.step()
    update = engine.scheduler.abort("r")
    assert update is not None
    assert update.finish is Finish.ABORT
    assert engine.scheduler.running == []
    assert engine.scheduler.kv.pool.num_free == engine.scheduler.kv.pool.num_blocks


def test_a_step_that_fails_ends_the_search_once() -> None:
    engine = engine_of()
    engine.scheduler.add(beam_request(prompt_of(11), 4, 8))
    for _ in range(3):
        engine.step()
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert len(plan) == 4
    updates = engine.scheduler.fail(plan, "the step failed")
    assert [(update.id, update.finish) for update in updates] == [("r", Finish.ERROR)]
    assert not engine.scheduler.has_work
    assert engine.scheduler.kv.pool.num_free == engine.scheduler.kv.pool.num_blocks


# ── what a request may ask for ────────────────────────────────────────────────────────────────────────────────────


class Odd:
    """After an even token only odd ones, and the other way round; 7 and 8 may end the answer after four tokens."""

    error = ""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = list(tokens)

    def may(self) -> set[int]:
        parity = (self.tokens[-1] + 1) % 2 if self.tokens else 0
        return {token for token in range(VOCABULARY) if token % 2 == parity}

    def allowed(self) -> bytes:
        may = self.may()
        return bytes(sum((8 * byte + bit in may) << bit for bit in range(8)) for byte in range(-(-VOCABULARY // 8)))

    def advance(self, token: int) -> None:
        assert token in self.may()
        self.tokens.append(token)

    def copy(self) -> Constraint:
        return Odd(self.tokens)


def test_constraints_fork_with_their_beams() -> None:
    prompt, ends = prompt_of(8), frozenset([7, 8])
    options: dict[str, Any] = {"width": 4, "max_tokens": 10}
    expected = plain_beam_search(prompt, FULL["llama"], ends, allowed=lambda tokens: Odd(tokens).may(), **options)
    for seed in (None, 1, 2):
        request = beam_request(prompt, 4, 10, ends=ends, constraint=Odd())
        assert_same(answers(run(engine_of(), [request], seed)["r"]), expected)


def test_bans_and_min_tokens() -> None:
    prompt = prompt_of(8)
    ends = likely_ends(prompt, 2)
    free = plain_beam_search(prompt, FULL["llama"], frozenset(), width=3, max_tokens=8)
    kept = [token for token in range(VOCABULARY) if token != free[0].tokens[0]]
    expected = plain_beam_search(
        prompt, FULL["llama"], ends, width=3, max_tokens=8,
        allowed=lambda tokens: set(kept) - (ends if len(tokens) < 4 else set()),
    )  # fmt: skip
    request = beam_request(prompt, 3, 8, ends=ends, allowed_token_ids=kept, min_tokens=4)
    found = answers(run(engine_of(), [request])["r"])
    assert_same(found, expected)
    assert all(len(each.tokens) > 4 for each in found)


class Narrow(Odd):
    """Five tokens at first; then most beams find nothing that may follow, and the others little."""

    def may(self) -> set[int]:
        if len(self.tokens) < 2:
            return {11, 12, 13, 14, 15}
        return {sum(self.tokens) % VOCABULARY} if sum(self.tokens[:2]) % 3 else set()

    def copy(self) -> Constraint:
        return Narrow(self.tokens)


@pytest.mark.parametrize("width", [2, 4, 6, 9])
def test_beams_without_a_continuation_are_dropped(width: int) -> None:
    for seed in (0, 2, 3, 4, 5, 6):  # prompts that leave at least one beam
        prompt = prompt_of(8, seed)
        expected = plain_beam_search(
            prompt, FULL["llama"], frozenset(), width=width, max_tokens=7, allowed=lambda tokens: Narrow(tokens).may()
        )  # fmt: skip
        for preempts in (None, seed):
            update = run(engine_of(), [beam_request(prompt, width, 7, constraint=Narrow())], preempts)["r"]
            assert expected
            assert_same(answers(update), expected)


class Nothing(Odd):
    def may(self) -> set[int]:
        return set() if len(self.tokens) > 2 else {3, 4}

    def copy(self) -> Constraint:
        return Nothing(self.tokens)


def test_a_search_in_which_nothing_may_follow_is_refused() -> None:
    request = beam_request(prompt_of(8), 2, 10, constraint=Nothing(), allowed_token_ids=[3, 4])
    update = run(engine_of(), [request])["r"]
    assert update.finish is Finish.ERROR
    assert update.detail is not None
    assert update.detail.refused
    assert "no token that could come next" in update.detail.message


class Pair:
    """A stop string of two tokens in a row."""

    def __init__(self, pair: tuple[int, int], last: int | None = None) -> None:
        self.pair, self.last = pair, last

    def advance(self, token: int) -> bool:
        is_hit = (self.last, token) == self.pair
        self.last = token
        return is_hit

    def copy(self) -> Pair:
        return Pair(self.pair, self.last)


def test_stop_strings_end_beams() -> None:
    prompt = prompt_of(8, 3)
    free = plain_beam_search(prompt, FULL["llama"], frozenset(), width=4, max_tokens=6)
    pair = free[0].tokens[0], free[0].tokens[1]
    expected = plain_beam_search(
        prompt, FULL["llama"], frozenset(), width=4, max_tokens=9,
        is_stopped=lambda tokens: tuple(tokens[-2:]) == pair,
    )  # fmt: skip
    assert any(tuple(each.tokens[-2:]) == pair for each in expected)
    for seed in (None, 3):
        found = answers(run(engine_of(), [beam_request(prompt, 4, 9, stop_matcher=Pair(pair))], seed)["r"])
        assert_same(found, expected)
        ends = [each.finish for each in found]
        assert ends == [Finish.STOP if tuple(each.tokens[-2:]) == pair else Finish.LENGTH for each in found]


def test_log_probabilities_belong_to_the_beams() -> None:
    prompt = prompt_of(8)
    request = beam_request(prompt, 3, 6, logprobs=2, allowed_token_ids=list(range(0, VOCABULARY, 3)))
    for found in answers(run(engine_of(), [request])["r"]):
        assert found.logprobs is not None
        assert [position.chosen[0] for position in found.logprobs] == found.tokens
        assert sum(position.chosen[1] for position in found.logprobs) == pytest.approx(found.cum_logprob, abs=1e-6)
        for nth, position in enumerate(found.logprobs):
            every = FULL["llama"]([*prompt, *found.tokens[:nth]])
            assert position.chosen[1] == pytest.approx(every[position.chosen[0]], abs=1e-5)
            assert position.chosen[2] == 1 + sum(other > every[position.chosen[0]] for other in every)
            assert [value for _, value, _ in position.top] == pytest.approx(sorted(every, reverse=True)[:2], abs=1e-5)


def test_fewer_answers_than_beams() -> None:
    prompt = prompt_of(8)
    every = answers(run(engine_of(), [beam_request(prompt, 4, 6)])["r"])
    assert answers(run(engine_of(), [beam_request(prompt, 4, 6, n=2, best_of=4)])["r"]) == every[:2]


def test_prompt_log_probabilities_come_once() -> None:
    engine, request = engine_of(max_tokens=5, max_requests=4), beam_request(prompt_of(12), 3, 5, prompt_logprobs=0)
    engine.scheduler.add(request)
    scored = []
    while engine.scheduler.has_work and (plan := engine.scheduler.schedule()):
        for update in engine.scheduler.commit(plan, engine.runner.launch(plan).wait()):
            scored += (update.detail and update.detail.prompt_logprobs) or []
        if len(scored) == 11 and request.num_preemptions == 0:
            engine.scheduler._preempt(request)
    assert [position.chosen[0] for position in scored] == list(request.prompt[1:])


def test_logits_that_are_not_numbers_end_the_search() -> None:
    engine = engine_of()
    engine.scheduler.add(beam_request(prompt_of(5), 2, 4))
    plan = engine.scheduler.schedule()
    assert plan is not None
    step = engine.runner.launch(plan)
    samples, hidden = step.samples, torch.full_like(step.hidden, torch.nan)  # type: ignore[attr-defined]
    step.output = engine.runner.sampler.sample(samples, hidden)  # type: ignore[attr-defined]
    (update,) = engine.scheduler.commit(plan, step.wait())
    assert update.finish is Finish.ERROR
    assert update.detail is not None
    assert "not numbers" in update.detail.message


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidParams, match="width 6 needs 6 rows"):
        engine_of(max_requests=5).scheduler.add(beam_request([1], 6, 4))
    with pytest.raises(PromptTooLong, match="in 6 beams need 32 blocks"):
        engine_of(num_blocks=25).scheduler.add(beam_request(prompt_of(9), 6, 16))
    engine = engine_of(num_blocks=26)
    assert len(answers(run(engine, [beam_request(prompt_of(9), 6, 15)])["r"])) == 6
