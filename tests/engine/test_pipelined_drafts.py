"""Drafts on a device that computes one plan while the next is planned, in simulated time: plain decoding keeps both in
flight where drafts do not pay, and speculation never loses more than its ledger allows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from quire.core.drafts import Drafts
from quire.core.pace import Pace
from quire.core.params import SamplingParams
from quire.core.plan import Plan, Sampled
from quire.core.request import Finish, Request
from quire.core.scheduler import Scheduler
from quire.engine import engine as module
from quire.engine.engine import Engine
from quire.engine.runner import accept
from quire.speculative.controller import Controller
from quire.speculative.drafting import Drafting
from quire.speculative.proposer import Context
from quire.speculative.step_times import StepTimes
from tests.engine.test_step_ahead import Clock

pytestmark = pytest.mark.cpu

STEP_S, LAUNCH_S, DELIVERY_S, PROPOSE_S = 4e-3, 0.25e-3, 0.1e-3, 20e-6
PASS_S = 0.24e-3
CAPTURE_S = 0.3
VOCAB_SIZE = 1000
NUM_TOKENS = 400


def answer_of(request_id: str, position: int) -> int:
    return random.Random(f"{request_id} {position}").randrange(VOCAB_SIZE)


@dataclass
class Step:
    """`chance`: that of drafts which the device has made."""

    clock: Clock
    plan: Plan
    begin_s: float
    end_s: float
    chance: float = 0.0

    @property
    def must_commit_first(self) -> bool:
        return bool(self.plan.drafts or self.plan.drafted)

    def sample(self) -> None:
        pass

    def is_done(self) -> bool:
        return self.clock.now >= self.end_s

    def wait(self) -> Sampled:
        self.clock.now = max(self.clock.now, self.end_s)
        plan, sampled = self.plan, Sampled([[] for _ in self.plan.requests], seconds=self.end_s - self.begin_s)
        for row, request in enumerate(plan.requests):
            if not plan.yields[row]:
                continue
            depths = [0, *plan.drafts[row].depths()] if row in plan.drafts else [0]
            first = plan.starts[row] + plan.counts[row] - plan.yields[row] + 1
            tokens = [answer_of(request.id, first + depth) for depth in depths]
            nums_right = [0] * len(plan)
            if row in plan.drafts and plan.drafts[row].on_device:
                nums_right[row] = self._count_right(request.id, first, len(plan.drafts[row]))
            accept(plan, sampled, row, 0, tokens, [1.0] * len(tokens), {}, nums_right)
        return sampled

    def _count_right(self, request_id: str, first: int, count: int) -> int:
        are_right = [
            guess(request_id, first + nth, self.chance) == answer_of(request_id, first + nth) for nth in range(count)
        ]
        return [*are_right, False].index(False)


class Device:
    """A step takes STEP_S, and `slope` of that more for each draft. The host takes LAUNCH_S to launch one. Drafts that
    the device makes behind it take PASS_S each, and are right with the given chance."""

    depth = 2

    def __init__(self, clock: Clock, slope: float, chance: float = 0.0, num_captures: int = 0) -> None:
        self.clock, self.slope, self.chance, self.num_captures = clock, slope, chance, num_captures
        self.free_s = self.idle_s = 0.0
        self.plans: list[Plan] = []

    def launch(self, plan: Plan, is_behind: bool = False) -> Step:
        self.clock.now += LAUNCH_S
        self.plans.append(plan)
        begin_s = max(self.free_s, self.clock.now)
        self.idle_s += begin_s - self.free_s if self.free_s else 0.0
        self.free_s = begin_s + STEP_S * (1.0 + self.slope * sum(map(len, plan.drafts.values())))
        step = Step(self.clock, plan, begin_s, self.free_s, self.chance)
        self.free_s += PASS_S * max(plan.drafted.values(), default=0)
        return step

    def finish(self, request_id: str) -> None:
        pass

    def reset(self) -> None:
        pass

    def idle(self, seconds: float) -> bool:
        """The first few steps of drafts are followed by captures, which hold up a step in flight."""
        if self.num_captures and self.plans and self.plans[-1].drafts:
            self.num_captures -= 1
            self.clock.now += CAPTURE_S
            return True
        return False


def guess(request_id: str, position: int, chance: float) -> int:
    """Right with the given chance, and the same whenever it is asked."""
    is_right = random.Random(f"{request_id} {position} guess").random() < chance
    return (answer_of(request_id, position) + (not is_right)) % VOCAB_SIZE


class Guesser:
    """Positions can be guessed with the given chance, the same ones whenever it is asked."""

    name = "guesser"

    def __init__(self, clock: Clock, chance: float, seconds: float = PROPOSE_S) -> None:
        self.clock, self.chance, self.seconds = clock, chance, seconds

    def propose(self, contexts: Sequence[Context], max_drafts: Sequence[int]) -> list[Drafts | None]:
        found: list[Drafts | None] = []
        for context, most in zip(contexts, max_drafts, strict=True):
            self.clock.now += self.seconds
            positions = range(len(context.tokens), len(context.tokens) + min(most, 6))
            tokens = [guess(context.request_id, position, self.chance) for position in positions]
            found.append(Drafts(tokens, None, [0.9] * len(tokens)))
        return found

    def finish(self, request_id: str) -> None:
        pass

    def reset(self) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@dataclass
class Run:
    seconds: float  # from the first token on
    device: Device
    controller: Controller | None
    tokens: list[list[int]]


def run(
    clock: Clock,
    num_requests: int,
    guesser: Guesser | None,
    *,
    slope: float = 0.01,
    target_s: float | None = None,
    device_chance: float | None = None,
    num_captures: int = 0,
) -> Run:
    scheduler = Scheduler(10_000, 16, 4096, 256, pace=Pace(target_s, 1, STEP_S, 1e-6))
    device, controller = Device(clock, slope, device_chance or 0.0, num_captures), None
    if guesser is not None or device_chance is not None:
        controller = Controller(
            [] if guesser is None else [guesser], 1024, VOCAB_SIZE, 256.0, max_drafts=15, is_pipelined=True,
            drafting=None if device_chance is None else Drafting("eagle", 5),
        )  # fmt: skip
        controller._clock = clock.monotonic
    engine = Engine(scheduler, device, None, controller)  # type: ignore[arg-type]
    requests = [
        Request(str(number), [1, 2, 3], SamplingParams(), max_tokens=NUM_TOKENS) for number in range(num_requests)
    ]
    for request in requests:
        engine.add(request)
    while not all(request.num_output for request in requests):
        engine.step()
    begin_s = clock.now
    while engine.has_work:
        engine.step()
        clock.now += DELIVERY_S
    return Run(clock.now - begin_s, device, controller, [request.tokens[3:] for request in requests])


@pytest.mark.parametrize("target_s", [None, 0.025])
@pytest.mark.parametrize("num_requests", [1, 16, 64])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.9])
def test_no_chance_of_right_drafts_makes_decoding_slower(
    clock: Clock, chance: float, num_requests: int, target_s: float | None
) -> None:
    slope = 0.01 if num_requests == 1 else 0.0025
    plain = run(clock, num_requests, None, slope=slope, target_s=target_s)
    guessed = run(clock, num_requests, Guesser(clock, chance), slope=slope, target_s=target_s)
    assert guessed.tokens == plain.tokens
    assert guessed.seconds < plain.seconds / 0.98
    if chance == 0.9 and num_requests < 64:
        assert guessed.seconds < plain.seconds / 2
    if chance == 0.0:
        assert guessed.device.idle_s < 0.02 * guessed.seconds, "plain steps are launched behind each other"


def test_right_drafts_are_worth_a_gap_before_each_step(clock: Clock) -> None:
    guessed = run(clock, 1, Guesser(clock, 1.0))
    with_drafts = [plan for plan in guessed.device.plans if plan.drafts]
    assert len(with_drafts) > 0.9 * len(guessed.device.plans)
    assert len(guessed.device.plans) < NUM_TOKENS / 5


def test_a_step_with_drafts_is_charged_with_the_gap_before_it(clock: Clock) -> None:
    guessed = run(clock, 1, Guesser(clock, 0.9), slope=0.0)
    assert guessed.controller is not None
    times = guessed.controller.times
    assert times.plain_s(1) == pytest.approx(STEP_S, rel=0.03), "in a full pipeline"
    assert times.ratios(1, 6)[6] == pytest.approx((STEP_S + LAUNCH_S) / STEP_S, rel=0.02)


@pytest.mark.parametrize("num_requests", [1, 64])
@pytest.mark.parametrize("target_s", [None, 0.025])
def test_a_capture_while_a_step_runs_is_not_a_cost_of_drafts(
    clock: Clock, num_requests: int, target_s: float | None
) -> None:
    options: dict[str, Any] = {"slope": 0.0023, "device_chance": 0.9, "target_s": target_s}
    expected = run(clock, num_requests, None, **options)
    found = run(clock, num_requests, None, **options, num_captures=4)
    assert found.device.num_captures == 0
    assert found.controller is not None
    assert expected.controller is not None
    assert found.controller.ledger.gained_s > 0.9 * expected.controller.ledger.gained_s
    assert found.controller.times.ratios(num_requests, num_requests)[num_requests] == pytest.approx(
        expected.controller.times.ratios(num_requests, num_requests)[num_requests], rel=0.1
    )


def test_a_slow_proposer_is_not_asked_for_long(clock: Clock) -> None:
    plain = run(clock, 1, None)
    guessed = run(clock, 1, Guesser(clock, 0.0, seconds=0.1))
    assert guessed.seconds < plain.seconds + 0.4, "a few calls"
    guessed = run(clock, 1, Guesser(clock, 0.0, seconds=2e-3))
    assert guessed.seconds < plain.seconds / 0.98, "while a step runs its time is hidden"


def test_the_updates_of_a_step_with_drafts_are_delivered_while_the_next_one_runs(clock: Clock) -> None:
    guessed = run(clock, 1, Guesser(clock, 1.0))
    num_steps = len(guessed.device.plans)
    assert guessed.device.idle_s < num_steps * (LAUNCH_S + 2 * PROPOSE_S)


@pytest.mark.parametrize("where", ["launch", "wait"])
def test_a_step_with_drafts_that_fails_ends_its_own_requests_only(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    scheduler = Scheduler(100, 16, 4096, 256)
    device = Device(clock, 0.01)
    controller = Controller([Guesser(clock, 1.0)], 1024, VOCAB_SIZE, 256.0, max_drafts=15, is_pipelined=True)
    controller._clock = clock.monotonic
    info: Any = SimpleNamespace(device="cpu")
    engine = Engine(scheduler, device, info, controller)
    engine.add(Request("a", [1, 2, 3], SamplingParams(), max_tokens=50))
    plain = getattr(Device if where == "launch" else Step, where)
    failed: list[int] = []

    def fail(self: Any, *args: Any, **options: Any) -> Any:
        plan = args[0] if where == "launch" else self.plan
        if plan.drafts and not failed:
            failed.append(plan.step)
            raise RuntimeError("the device failed")
        return plain(self, *args, **options)

    monkeypatch.setattr(Device if where == "launch" else Step, where, fail)
    ends: dict[str, Any] = {}
    while engine.has_work:
        for update in engine.step():
            if update.finish:
                ends[update.id] = update.finish
        if failed and "b" not in scheduler.requests and "b" not in ends:
            engine.add(Request("b", [1, 2, 3], SamplingParams(), max_tokens=50))
    assert ends == {"a": Finish.ERROR, "b": Finish.LENGTH}
    assert scheduler.kv.pool.num_free == 100


@pytest.mark.parametrize(("num_requests", "slope"), [(1, 0.01), (16, 0.0025), (64, 0.0023), (256, 0.004)])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.9])
def test_drafts_that_the_device_makes_behind_steps_never_cost_much(
    clock: Clock, chance: float, num_requests: int, slope: float
) -> None:
    plain = run(clock, num_requests, None, slope=slope)
    guessed = run(clock, num_requests, None, slope=slope, device_chance=chance)
    assert guessed.tokens == plain.tokens
    assert guessed.seconds < plain.seconds / 0.98
    if chance == 0.9 and num_requests < 64:
        assert guessed.seconds < plain.seconds / 2
        assert guessed.device.idle_s < 0.05 * guessed.seconds, "the host works while the device drafts"


def test_a_capture_says_nothing_about_any_step_in_flight(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two plain steps in flight the second has ended, too, when the host has made the capture."""
    plain_s: list[float] = []
    learn = StepTimes.learn

    def note(times: StepTimes, num_rows: int, num_drafts: int, seconds: float) -> None:
        if not num_drafts:
            plain_s.append(seconds)
        learn(times, num_rows, num_drafts, seconds)

    def idle(device: Device, seconds: float) -> bool:
        if len(device.plans) not in (10, 40, 41, 42):
            return False
        device.clock.now += CAPTURE_S
        return True

    monkeypatch.setattr(StepTimes, "learn", note)
    monkeypatch.setattr(Device, "idle", idle)
    run(clock, 2, Guesser(clock, 0.0))
    assert plain_s[3:] == pytest.approx([STEP_S] * (len(plain_s) - 3), rel=0.15)


def test_a_request_with_the_id_of_one_that_has_ended_is_another(clock: Clock) -> None:
    """Drafts that the device has made behind the last step of the first are not those of the second."""
    scheduler, device = Scheduler(100, 16, 4096, 256), Device(clock, 0.01, chance=0.9)
    controller = Controller(
        [], 1024, VOCAB_SIZE, 256.0, max_drafts=15, is_pipelined=True, drafting=Drafting("eagle", 5)
    )  # fmt: skip
    controller._clock = clock.monotonic
    engine = Engine(scheduler, device, None, controller)  # type: ignore[arg-type]
    ends: list[Any] = []
    for params in [SamplingParams(), SamplingParams(presence_penalty=1.0)] * 10:  # the device drafts for the first only
        engine.add(Request("a", [1, 2, 3], params, max_tokens=50 + len(ends)))
        while engine.has_work:
            ends += [update.finish for update in engine.step() if update.finish]
    assert ends == [Finish.LENGTH] * 20
