"""Beam search on a GPU: the beams of a plain search, beside requests that are computed one step ahead."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.cuda import gpu  # skips this module where there is no GPU

from quire.core.params import SamplingParams  # isort: skip
from quire.core.plan import Hypothesis, Update
from quire.core.request import Request
from quire.engine.client import InProcess
from tests.engine.test_beam_search import Odd, Pair, plain_beam_search

pytestmark = pytest.mark.cuda

VOCABULARY = gpu.SMALL_MODEL["vocab_size"]
WIDTH, STEPS = 4, 12


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> InProcess:
    path = tmp_path_factory.mktemp("exact")
    return gpu.start(path, exact=True, max_len=512, num_blocks=256, max_requests=32)


def run(engine: InProcess, requests: Sequence[Request]) -> dict[str, list[Update]]:
    updates: dict[str, list[Update]] = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.engine.has_work:
        for update in engine.step():
            updates[update.id].append(update)
    scheduler = engine.engine.scheduler
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks
    return updates


def logprobs_of(engine: InProcess):
    """Of the tokens that a beam may take; each sequence is computed by itself."""

    def compute(tokens: Sequence[int]) -> list[float]:
        params = SamplingParams(temperature=0.0, logprobs=64, max_tokens=1)
        (update,) = run(engine, [Request("full", list(tokens), params, max_tokens=1)])["full"]
        assert update.detail is not None
        assert update.detail.logprobs is not None
        found = [float("-inf")] * VOCABULARY
        for token, logprob, _ in update.detail.logprobs[0].top:
            found[token] = logprob
        return found

    return compute


def search(prompt: list[int], name: str, ends: frozenset[int], **more) -> Request:
    options = {"temperature": 0.0, "n": WIDTH, "max_tokens": None, **more.pop("params", {})}
    params = SamplingParams(use_beam_search=True, **options)
    return Request(name, prompt, params, end_token_ids=ends, max_tokens=STEPS, **more)


def beams(updates: list[Update]) -> list[Hypothesis]:
    (update,) = updates
    assert update.detail is not None
    assert update.detail.beams is not None
    return update.detail.beams


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCABULARY) for _ in range(length)]


@pytest.mark.parametrize("early_stopping", [False, "never"])
def test_the_beams_of_a_plain_search_beside_others(exact: InProcess, early_stopping: bool | str) -> None:
    prompts = {f"s{number}": prompt_of(20 + 17 * number, number) for number in range(3)}
    requests, expected = [], {}
    for name, prompt in prompts.items():
        free = plain_beam_search(prompt, logprobs_of(exact), frozenset(), width=WIDTH, max_tokens=6)
        ends = frozenset([free[0].tokens[3]])
        expected[name] = plain_beam_search(
            prompt, logprobs_of(exact), ends, width=WIDTH, max_tokens=STEPS, early_stopping=early_stopping
        )
        requests.append(search(prompt, name, ends, params={"early_stopping": early_stopping}))
    others = [
        Request(f"n{number}", prompt_of(30, 50 + number), SamplingParams(temperature=0.9), seed=number, max_tokens=40)
        for number in range(8)
    ]
    alone = {other.id: tokens_of(run(exact, [fresh(other)])[other.id]) for other in others}
    updates = run(exact, [*others[:4], *requests, *others[4:]])
    for name, plain in expected.items():
        found = beams(updates[name])
        assert [each.tokens for each in found] == [each.tokens for each in plain]
        assert [each.score for each in found] == pytest.approx([each.score for each in plain], rel=1e-6)
    assert {other.id: tokens_of(updates[other.id]) for other in others} == alone


def tokens_of(updates: list[Update]) -> list[int]:
    return [token for update in updates for token in update.tokens]


def fresh(request: Request) -> Request:
    return Request(request.id, request.prompt, request.params, seed=request.seed, max_tokens=request.max_tokens)


def test_constraints_stop_strings_and_log_probabilities(exact: InProcess) -> None:
    prompt = prompt_of(25, 9)
    request = search(prompt, "s", frozenset(), constraint=Odd(), params={"logprobs": 3})
    for found in beams(run(exact, [request])["s"]):
        assert Odd(found.tokens[:-1]).may() >= {found.tokens[-1]}
        assert found.logprobs is not None
        assert [position.chosen[0] for position in found.logprobs] == found.tokens
        assert sum(position.chosen[1] for position in found.logprobs) == pytest.approx(found.cum_logprob, abs=1e-4)
    free = beams(run(exact, [search(prompt, "s", frozenset())])["s"])
    pair = free[0].tokens[0], free[0].tokens[1]
    request = search(prompt, "s", frozenset(), stop_matcher=Pair(pair), params={"length_penalty": 0.0})
    assert any(tuple(each.tokens[-2:]) == pair for each in beams(run(exact, [request])["s"]))


def test_a_search_computes_a_token_a_beam_and_step(exact: InProcess) -> None:
    counters = exact.engine.scheduler.counters
    before = counters.computed_tokens
    run(exact, [search(prompt_of(40, 77), "s", frozenset())])
    assert counters.computed_tokens - before == 40 + WIDTH * (STEPS - 1)
