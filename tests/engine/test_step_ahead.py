"""A runner that works ahead: behind a long step the next one is planned late, so that arrivals join it."""

from __future__ import annotations

import random
from dataclasses import dataclass
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


@dataclass
class SlowStep:
    clock: Clock
    plan: Plan
    begin_s: float
    end_s: float

    must_commit_first = False

    def sample(self) -> None:
        pass

    def is_done(self) -> bool:
        return self.clock.now >= self.end_s

    def wait(self) -> Sampled:
        self.clock.now = max(self.clock.now, self.end_s)
        tokens = [[7] if num_yields else [] for num_yields in self.plan.yields]
        return Sampled(tokens, seconds=self.end_s - self.begin_s)


class SlowRunner:
    """Computes one plan after the other: 5 ms each if not told otherwise, and 20 us for each prompt token."""

    depth = 2

    def __init__(
        self, clock: Clock, launch_s: float = 0.0, stalls: dict[int, float] | None = None, decode_s: float = 0.005
    ) -> None:
        self.clock, self.launch_s, self.stalls, self.decode_s = clock, launch_s, stalls or {}, decode_s
        self.free_s, self.busy_s, self.plans = 0.0, 0.0, list[tuple[float, Plan]]()
        self.spare: list[float] = []

    def launch(self, plan: Plan, is_behind: bool = False) -> SlowStep:
        self.clock.now += self.launch_s
        step_s = self.decode_s + 20e-6 * (plan.num_tokens - len(plan)) + self.stalls.get(len(self.plans), 0.0)
        self.plans.append((self.clock.now, plan))
        begin_s = max(self.free_s, self.clock.now)
        self.free_s = begin_s + step_s
        self.busy_s += step_s
        return SlowStep(self.clock, plan, begin_s, self.free_s)

    def finish(self, request_id: str) -> None:
        pass

    def reset(self) -> None:
        pass

    def idle(self, seconds: float) -> bool:
        self.spare.append(seconds)
        return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def make(clock: Clock, target_s: float | None, **options: Any) -> tuple[Engine, SlowRunner]:
    scheduler = Scheduler(10_000, 16, 4096, 64, pace=Pace(target_s, 1, 0.005, 20e-6))
    runner = SlowRunner(clock, **options)
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
    assert 0.020 < launched_s - begun_s < 0.028
    assert runner.free_s > launched_s, "the GPU was not kept waiting"


def test_what_arrives_while_answers_run_joins_the_next_step(clock: Clock) -> None:
    """Steps of single tokens are long enough to plan behind them, too; the device is not kept waiting by that."""
    engine, runner = make(clock, 0.025)
    engine.add(ask("a", 10))
    while engine.scheduler.requests["a"].num_output < 5:
        engine.step()
    begun_s, num_plans, busy_s = clock.now, len(runner.plans), runner.busy_s
    assert engine.step() == []
    engine.add(ask("b", 100))
    while len(runner.plans) == num_plans:
        engine.step()
    assert [request.id for request in runner.plans[-1][1].requests] == ["a", "b"]
    while engine.scheduler.requests["a"].num_output < 40:
        engine.step()
    assert runner.busy_s - busy_s > 0.95 * (runner.free_s - begun_s)


def test_behind_short_steps_nobody_waits(clock: Clock) -> None:
    engine, runner = make(clock, 0.025, decode_s=0.002)
    engine.add(ask("a", 10, 200))
    while engine.scheduler.requests["a"].num_output < 20:
        engine.step()
    runner.spare.clear()
    for _ in range(20):
        assert engine.step()
    assert runner.spare == []


def test_without_a_target_nothing_is_held_back(clock: Clock) -> None:
    engine, runner = make(clock, None)
    engine.add(ask("a", 900))
    for _ in range(4):
        assert engine.step()
    assert all(seconds > 0 for seconds in runner.spare[1:]), "until the last plan launched has ended"
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


def serve(engine: Engine, clock: Clock, per_second: float, seconds: float) -> list[float]:
    """Random arrivals; seconds to the first token of each request, in their order."""
    rng = random.Random(3)
    begin_s, at_s, number = clock.now, clock.now, 0
    due: dict[str, float] = {}
    first: dict[str, float] = {}
    while engine.has_work or at_s < begin_s + seconds:
        if not engine.has_work:
            clock.now = max(clock.now, at_s)
        while at_s <= clock.now and at_s < begin_s + seconds:
            name = str(number)
            due[name], number = at_s, number + 1
            engine.add(Request(name, [rng.randrange(10**9) for _ in range(rng.randint(32, 1024))], SamplingParams(),
                               max_tokens=rng.randint(16, 256)))  # fmt: skip
            at_s += rng.expovariate(per_second)
        for update in engine.step():
            first.setdefault(update.id, clock.now - due[update.id])
    return [first[name] for name in due]


def worst_after(waits: list[float], skipped: int) -> float:
    return sorted(waits[skipped:])[int(0.95 * len(waits[skipped:]))]


@pytest.mark.parametrize("stalls", [{0: 0.7}, {300: 1.0}, {300: 5.0}, {100: 0.2, 200: 0.2, 300: 0.2}], ids=str)
def test_steps_that_hang_are_forgotten_soon(clock: Clock, stalls: dict[int, float]) -> None:
    engine, _ = make(clock, 0.025)
    usual = worst_after(serve(engine, clock, 25, 20), 0)
    engine, runner = make(clock, 0.025, stalls=stalls)
    begin_s = clock.now
    waits = serve(engine, clock, 25, 60)
    assert worst_after(waits, len(waits) // 2) < 1.5 * usual
    assert engine.scheduler.pace.token_s == pytest.approx(20e-6, rel=0.3)
    assert runner.busy_s > 0.4 * (clock.now - begin_s)


def test_a_wrong_estimate_is_corrected(clock: Clock) -> None:
    for decode_s, token_s in ((0.005, 1e-3), (0.5, 20e-6), (0.005, 1e-6)):
        engine, _ = make(clock, 0.025)
        engine.scheduler.pace.decode_s, engine.scheduler.pace.token_s = decode_s, token_s
        waits = serve(engine, clock, 25, 30)
        assert worst_after(waits, len(waits) // 2) < 0.15
        assert engine.scheduler.pace.token_s == pytest.approx(20e-6, rel=0.3)


def find_late(runner: SlowRunner) -> list[int]:
    """The plans that were launched when the plan before had ended, though work was there: a request went on."""
    late, ends_s, before = [], 0.0, set[str]()
    for number, (launched_s, plan) in enumerate(runner.plans):
        ids = {request.id for request in plan.requests}
        if launched_s > ends_s and ids & before:
            late.append(number)
        step_s = runner.decode_s + 20e-6 * (plan.num_tokens - len(plan)) + runner.stalls.get(number, 0.0)
        ends_s, before = max(ends_s, launched_s) + step_s, ids
    return late


@pytest.mark.parametrize("launch_s", [0.001, 0.003])
def test_planning_takes_as_long_as_it_takes(clock: Clock, launch_s: float) -> None:
    """A slow host plans sooner, so that the device does not wait for it behind long steps."""
    engine, runner = make(clock, 0.025, launch_s=launch_s)
    serve(engine, clock, 10, 10)
    assert len(find_late(runner)) < 0.05 * len(runner.plans)
    assert engine.scheduler.pace.token_s == pytest.approx(20e-6, rel=0.3)


def test_an_end_expected_too_late_is_not_handed_on(clock: Clock) -> None:
    """Steps that took long for a while are expected to again. One that ends sooner delays the next, not all others."""
    stalls = dict.fromkeys(range(20, 30), 0.05)
    engine, runner = make(clock, 0.012, launch_s=0.0025, stalls=stalls, decode_s=0.012)
    engine.add(ask("a", 10, 400))
    while engine.has_work:
        engine.step()
    late = find_late(runner)
    assert len(late) < 12
    assert max(late) < 60


def test_steps_that_vary_a_little_are_planned_in_time(clock: Clock) -> None:
    rng = random.Random(1)
    stalls = {number: rng.uniform(-0.0016, 0.0016) for number in range(400)}
    engine, runner = make(clock, 0.008, launch_s=0.001, stalls=stalls, decode_s=0.010)
    engine.add(ask("a", 10, 390))
    while engine.has_work:
        engine.step()
    assert len(find_late(runner)) < 5


def test_what_a_step_took_is_said_once(clock: Clock) -> None:
    engine, runner = make(clock, 0.025)
    engine.add(ask("a", 900, 10))
    told = []
    while engine.has_work:
        engine.step()
        if engine.step_s is not None:
            told.append(engine.step_s)
    assert sum(told) == pytest.approx(runner.busy_s)
    assert len(told) == len(runner.plans)


def test_the_time_until_a_plan_is_made_may_be_used(clock: Clock) -> None:
    engine, runner = make(clock, 0.025)
    engine.add(ask("a", 10))
    while engine.scheduler.requests["a"].num_output < 3:
        engine.step()
    engine.add(ask("b", 900))
    for _ in range(20):
        engine.step()
    assert max(runner.spare) == pytest.approx(0.022, abs=0.003)
    assert min(runner.spare) > 0


def run_to_end(engine: Engine) -> dict[str, tuple[int, str]]:
    """How many tokens each request got, and why it ended."""
    counts: dict[str, int] = {}
    ends: dict[str, tuple[int, str]] = {}
    while engine.has_work:
        for update in engine.step():
            counts[update.id] = counts.get(update.id, 0) + len(update.tokens)
            if update.finish is not None:
                ends[update.id] = counts[update.id], update.finish.value
    return ends


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["_enqueue", "_finish"])
def test_an_error_while_a_request_is_added_or_aborted_costs_the_others_time_only(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, name: str, error: type[BaseException]
) -> None:
    engine, _ = make(clock, None)
    for request_id in "abd":
        engine.add(ask(request_id, 10, 6))
    engine.step()
    assert engine._launched, "a plan is in flight"
    method = getattr(engine.scheduler, name)

    def fail(request: Request) -> None:
        if request.id in "cd":
            raise error
        method(request)

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, name, fail)
        with pytest.raises(error):
            engine.add(ask("c", 10, 6)) if name == "_enqueue" else engine.abort("d")
    ends = run_to_end(engine)
    assert {each: finish for each, (_, finish) in ends.items() if each in "ab"} == {"a": "length", "b": "length"}
    assert "c" not in ends
    assert engine.scheduler.kv.pool.num_free == 10_000


def test_behind_a_step_that_fails_the_next_is_sampled(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose sampling waits for the tokens before it must not wait for ever."""
    engine, _ = make(clock, None)
    sampled = list[int]()
    monkeypatch.setattr(SlowStep, "sample", lambda step: sampled.append(step.plan.step))
    engine.add(ask("a", 10, 6))
    engine.step()
    engine.add(ask("b", 10, 6))
    engine.step()
    failing = engine._launched[0]
    monkeypatch.setattr(failing.running, "wait", lambda: 1 / 0)
    monkeypatch.setattr(engine, "_check_device", lambda error: None)
    while failing in engine._launched:
        engine.step()
    assert engine._launched
    assert engine._launched[0].plan.step in sampled
