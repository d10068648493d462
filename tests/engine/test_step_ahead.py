"""A runner that works ahead: behind a long step the next one is planned late, so that arrivals join it."""

from __future__ import annotations

from typing import Any

import pytest

from quire.core.pace import Pace
from quire.core.params import SamplingParams
from quire.core.plan import Plan, Sampled
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.engine import engine as module
from quire.engine.engine import Engine

pytestmark = pytest.mark.cpu


class Clock:
    """Time that passes when somebody sleeps or waits for a step."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class SlowRunner:
    """Computes one plan after the other: 5 ms each, and 20 us for each prompt token."""

    depth = 2

    def __init__(self, clock: Clock) -> None:
        self.clock, self.free_s, self.plans = clock, 0.0, list[tuple[float, Plan]]()

    def launch(self, plan: Plan) -> Any:
        self.plans.append((self.clock.now, plan))
        self.free_s = end_s = max(self.free_s, self.clock.now) + 0.005 + 20e-6 * (plan.num_tokens - len(plan))

        def land() -> Sampled:
            self.clock.now = max(self.clock.now, end_s)
            return Sampled([[7] if num_yields else [] for num_yields in plan.yields])

        return land

    def idle(self) -> bool:
        return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def make(clock: Clock, target_s: float | None) -> tuple[Engine, SlowRunner]:
    scheduler = Scheduler(1000, 16, 4096, 8, pace=Pace(target_s, 1, 0.005, 20e-6))
    runner = SlowRunner(clock)
    return Engine(scheduler, runner, None), runner  # type: ignore[arg-type]


def ask(name: str, num_prompt: int, max_tokens: int = 50) -> Request:
    return Request(name, list(range(num_prompt)), SamplingParams(), max_tokens=max_tokens)


def test_what_arrives_during_a_long_step_joins_the_next(clock: Clock) -> None:
    engine, runner = make(clock, 0.025)
    engine.add(ask("a", 10))
    while not runner.plans or len(runner.plans[-1][1]) < 1 or engine.scheduler.requests["a"].num_output < 3:
        engine.step()
    engine.add(ask("b", 900))
    while not any(plan.num_tokens > 500 for _, plan in runner.plans):
        engine.step()
    begun_s, num_plans = runner.plans[-1][0], len(runner.plans)
    engine.step()  # takes in the plan before it
    assert engine.step() == [], "the long step has just begun"
    engine.add(ask("c", 20))
    while len(runner.plans) == num_plans:
        assert engine.step() == [] or len(runner.plans) > num_plans
    launched_s, plan = runner.plans[-1]
    assert "c" in [request.id for request in plan.requests]
    assert 0.010 < launched_s - begun_s < 0.024
    assert runner.free_s > launched_s, "the GPU was not kept waiting"


def test_without_a_target_nothing_is_held_back(clock: Clock) -> None:
    engine, runner = make(clock, None)
    engine.add(ask("a", 900))
    for _ in range(4):
        assert engine.step()
    gaps = [later - earlier for (earlier, _), (later, _) in zip(runner.plans, runner.plans[1:], strict=False)]
    assert gaps[0] == 0.0


def test_the_answers_are_the_same(clock: Clock) -> None:
    answers = []
    for target_s in (None, 0.025):
        engine, _ = make(clock, target_s)
        requests = [ask(f"{index}", 100 + 300 * index, 20) for index in range(6)]
        for request in requests:
            engine.add(request)
        while engine.has_work:
            engine.step()
        answers.append([request.tokens for request in requests])
    assert answers[0] == answers[1]
