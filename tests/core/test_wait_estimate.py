"""Estimates of waits against a scheduler whose steps take a known time, and the lengths of answers they assume."""

from __future__ import annotations

import random
from statistics import median

import pytest

from quire.core.explain import Explainer
from quire.core.params import SamplingParams
from quire.core.plan import Plan, Sampled
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.core.wait_estimate import AnswerLengths, Demand, OutputRate, Supply, estimate_waits

pytestmark = pytest.mark.core

DECODE_S, TOKEN_S = 0.02, 0.001


def test_one_after_another() -> None:
    """One row: each waits for the answer and the prompt before it."""
    supply = Supply(num_rows=0, num_blocks=100, output_token_s=0.1, prompt_token_s=0.01)
    running = [Demand(0, 10, 1, 5)]
    line = [Demand(100, 20, 1, 5), Demand(0, 5, 1, 5), Demand(0, 5, 1, 5)]
    assert estimate_waits(running, line, supply) == pytest.approx([1.0, 1.0 + 1.0 + 2.0, 4.5])


def test_blocks_come_from_those_that_end_first() -> None:
    supply = Supply(num_rows=8, num_blocks=2, output_token_s=1.0, prompt_token_s=0.0)
    running = [Demand(0, 9, 1, 4), Demand(0, 3, 1, 4)]
    assert estimate_waits(running, [Demand(0, 1, 1, 6), Demand(0, 1, 1, 6)], supply) == [3.0, 4.0]


def test_a_static_batch_waits_for_the_last() -> None:
    supply = Supply(num_rows=8, num_blocks=90, output_token_s=1.0, prompt_token_s=0.0, waits_for_all=True)
    assert estimate_waits([Demand(0, 9, 1, 4), Demand(0, 3, 1, 4)], [Demand(0, 1, 1, 6)], supply) == [9.0]


def test_answers_are_as_long_as_recent_longer_ones() -> None:
    lengths = AnswerLengths()
    assert lengths.expected_left(10, 60) == 50
    for length in (10, 20, 40):
        lengths.add(length)
    assert lengths.expected_left(0, 1000) == pytest.approx(70 / 3)
    assert lengths.expected_left(10, 1000) == 20
    assert lengths.expected_left(30, 35) == 5
    assert lengths.expected_left(40, 100) == 60
    assert lengths.expected_left(60, 60) == 0


def test_the_rate_of_tokens_follows_what_is_measured() -> None:
    rate = OutputRate()
    assert rate.token_s is None
    rate.add(4.0, 8)
    assert rate.token_s == 0.5
    for _ in range(200):
        rate.add(4.0, 40)
    assert rate.token_s == pytest.approx(0.1, rel=0.01)


def step_s(plan: Plan) -> float:
    return DECODE_S + TOKEN_S * (plan.num_tokens - len(plan))


def test_half_of_all_estimates_are_within_a_third() -> None:
    """Queues that are worked off with answers of a known length. The estimate is made when each request has arrived."""
    errors: list[float] = []
    for seed in range(8):
        rng = random.Random(f"estimate {seed}")
        scheduler = Scheduler(rng.choice([40, 400]), 16, 256, rng.choice([2, 4, 8]))
        for number in range(24):
            prompt = [rng.randrange(1000) for _ in range(rng.randint(5, 200))]
            params = SamplingParams(max_tokens=None, ignore_eos=True)
            scheduler.add(Request(f"r{number}", prompt, params, max_tokens=rng.randint(5, 60)), 0.0)
        for _ in range(3):
            run_step(scheduler)
        estimates = estimate(scheduler)
        now_s, admitted = 0.0, dict[str, float]()
        while scheduler.has_work:
            waiting = {request.id for request in scheduler.waiting_requests(100)}
            now_s += run_step(scheduler, waiting, admitted, now_s)
        errors += [abs(estimates[name] - admitted[name]) / max(admitted[name], DECODE_S) for name in estimates]
    assert len(errors) > 100
    assert median(errors) < 0.3, sorted(errors)


def estimate(scheduler: Scheduler) -> dict[str, float]:
    """As the server makes it, but that answers are known to use all their tokens."""
    explainer = Explainer(scheduler)
    room = explainer.room(0.0)
    line = explainer.explain(room, 100)
    supply = Supply(room.num_rows, room.num_free_blocks - room.num_reserved_blocks, DECODE_S, TOKEN_S)
    running = [
        Demand(len(each.tokens) - each.num_computed - 1, each.max_len - len(each.tokens), 1, len(each.tables[0]))
        for each in scheduler.running
    ]
    demands = [Demand(len(each.tokens), each.max_tokens, 1, wait.num_blocks or 0) for each, wait in line.items()]
    return dict(zip((each.id for each in line), estimate_waits(running, demands, supply), strict=True))


def run_step(
    scheduler: Scheduler,
    waiting: set[str] | None = None,
    admitted: dict[str, float] | None = None,
    now_s: float = 0.0,
) -> float:
    plan = scheduler.schedule(now_s)
    assert plan is not None
    if waiting is not None and admitted is not None:
        admitted.update((request.id, now_s) for request in plan.requests if request.id in waiting)
    scheduler.commit(plan, Sampled([[1] if num_yields else [] for num_yields in plan.yields]))
    return step_s(plan)
