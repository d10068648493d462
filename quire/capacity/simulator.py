"""Simulator: the real Scheduler, KVCache and PrefixTree, with a clock that advances by the predicted cost of each step.

It computes no token: answers have the lengths that they are given. So queues, chunks of prompts, cache hits, evictions
and preemptions are those of an engine, as far as step times are right. One instance is one engine.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from quire.capacity.leap import MIN_STEPS, Leap, may_leap
from quire.capacity.profile import CapacityProfile
from quire.capacity.step_cost import Cost, shape_of
from quire.core.params import SamplingParams
from quire.core.plan import Plan, Sampled
from quire.core.policy import Policy
from quire.core.request import Finish, Request
from quire.core.step_costs import StepCosts
from quire.errors import PromptTooLong

REPORTED_STEPS = 33  # of a leap, the last ones: averages of older steps have faded
WAIT_S = 1e-3  # while a batching policy waits for more requests
SAMPLED_TOKEN = 1 << 40  # answers share no prefix with prompts


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of the simulated load. Equal tokens at the beginning of prompts are shared."""

    at_s: float
    prompt: Sequence[int]
    output_tokens: int
    tenant: str = ""


@dataclass(slots=True)
class SimulatedRequest:
    """What became of a request. Times are seconds of the virtual clock."""

    number: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    times: list[float] = field(default_factory=list)  # of its tokens
    started_s: float | None = None  # the begin of its first step
    cached_tokens: int = 0
    num_preemptions: int = 0
    refused: str | None = None

    @property
    def ttft_s(self) -> float | None:
        return self.times[0] - self.arrival_s if self.times else None


class Simulation:
    """One engine on a virtual clock. `on_end` gets each request that ends or is refused."""

    def __init__(
        self,
        profile: CapacityProfile,
        policy: Policy | None = None,
        cost: Cost | None = None,
        *,
        on_end: Callable[[SimulatedRequest], object] | None = None,
        on_step: Callable[[int, int, float], object] = lambda num_tokens, num_rows, seconds: None,
        leaps: bool = True,
    ) -> None:
        """Without `leaps` every step is planned by itself; the times are the same. `on_step` gets the tokens, rows and
        seconds of steps, of a leap only of the last ones."""
        self.scheduler = profile.sizes.scheduler(policy)
        self.now_s = 0.0
        self.num_steps = 0
        self.busy_s = 0.0
        self._ended: list[SimulatedRequest] = []
        self._on_end = on_end or self._ended.append
        self._on_step = on_step
        self._leaps = leaps
        self._cost = cost or profile.cost
        self._max_len = profile.sizes.max_len
        self._depth = profile.sizes.depth
        self._costs = StepCosts(self.scheduler.swap.costs, self.scheduler.pace, self.scheduler.max_tokens_per_step)
        self._in_flight: deque[tuple[float, Plan]] = deque()  # plans and their ends, the oldest first
        self._requests: dict[str, tuple[SimulatedRequest, Request]] = {}  # unfinished
        self._not_started: set[str] = set()
        self._num_added = 0

    def run(self, arrivals: Iterable[Arrival]) -> list[SimulatedRequest]:
        """Simulate until every request has ended. `arrivals` are in the order of their times."""
        last_s = -math.inf
        for arrival in arrivals:
            assert arrival.at_s >= last_s, "arrivals are in the order of their times"
            last_s = arrival.at_s
            self.advance(arrival.at_s)
            self.add(arrival)
        self.advance(math.inf)
        return sorted(self._ended, key=lambda request: request.number)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight)

    def advance(self, until_s: float) -> None:
        """Make the steps that are planned before `until_s`. The last one may end later."""
        while self.now_s < until_s and self.has_work:
            if self._leaps and self._leap(until_s):
                continue
            plan = self._schedule()
            if plan is not None:
                self._launch(plan)
            if self._in_flight and (plan is None or len(self._in_flight) >= self._depth):
                end_s, oldest = self._in_flight.popleft()
                self.now_s = max(self.now_s, end_s)
                self._commit(oldest)
            elif plan is None:  # the batching policy looks again later
                self.now_s = min(self.now_s + WAIT_S, max(self.now_s, until_s))
        if not self.has_work and until_s < math.inf:
            self.now_s = max(self.now_s, until_s)

    def add(self, arrival: Arrival, number: int | None = None) -> SimulatedRequest:
        """Queue a request, at its time or when the step that runs then has ended. It may be refused."""
        number = self._num_added if number is None else number
        self._num_added += 1
        simulated = SimulatedRequest(number, arrival.at_s, len(arrival.prompt), arrival.output_tokens)
        total = len(arrival.prompt) + arrival.output_tokens
        if total > self._max_len:
            simulated.refused = f"{total:,} tokens are more than {self._max_len:,}, the longest request"
            self._on_end(simulated)
            return simulated
        request = Request(
            str(number),
            arrival.prompt,
            SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True),
            max_tokens=arrival.output_tokens,
            tenant=arrival.tenant,
        )
        try:
            self.scheduler.add(request, arrival.at_s)
        except PromptTooLong as error:
            simulated.refused = str(error)
            self._on_end(simulated)
            return simulated
        self._requests[request.id] = simulated, request
        self._not_started.add(request.id)
        return simulated

    def _leap(self, until_s: float) -> bool:
        """Make several steps at once. Returns False if the next one must be planned."""
        if not may_leap(self.scheduler, self._in_flight, self._depth):
            return False
        plan = self._in_flight[0][1] if self._in_flight else None
        leap = Leap(self.scheduler, self._cost, SAMPLED_TOKEN + self.num_steps + 1, plan)
        if leap.max_steps < MIN_STEPS:
            return False
        ends = deque(end_s for end_s, _ in self._in_flight)
        self.now_s = leap.run(self.now_s, until_s, ends, leap.max_steps)
        if plan is not None:
            self._in_flight[0] = ends[0], plan
        self.num_steps += len(leap.times)
        self.busy_s += leap.busy_s
        for earlier, later in pairwise(leap.times[-REPORTED_STEPS:]):
            self._on_step(len(leap.rows), len(leap.rows), later - earlier)
        for row in leap.rows:
            self._requests[row.request.id][0].times += leap.times
        return bool(leap.times)

    def _schedule(self) -> Plan | None:
        if not self.scheduler.has_work or len(self._in_flight) >= self._depth:
            return None
        return self.scheduler.schedule(self.now_s)

    def _launch(self, plan: Plan) -> None:
        """The step begins when the one before it ends."""
        seconds = self._cost.seconds(shape_of(plan, self._cost.windows))
        begin_s = max(self.now_s, self._in_flight[-1][0]) if self._in_flight else self.now_s
        self._in_flight.append((begin_s + seconds, plan))
        self._note_starts(plan, begin_s)
        self._costs.learn(plan, seconds)
        self._on_step(plan.num_tokens, len(plan), seconds)
        self.num_steps += 1
        self.busy_s += seconds

    def _note_starts(self, plan: Plan, begin_s: float) -> None:
        if not self._not_started:
            return
        for name in self._not_started.intersection(request.id for request in plan.requests):
            self._not_started.discard(name)
            self._requests[name][0].started_s = begin_s

    def _commit(self, plan: Plan) -> None:
        """Give each row its token."""
        tokens = [[SAMPLED_TOKEN + self.num_steps] if count else [] for count in plan.yields]
        for update in self.scheduler.commit(plan, Sampled(tokens)):
            simulated, request = self._requests[update.id]
            simulated.times += [self.now_s] * len(update.tokens)
            if update.finish:
                assert update.finish is Finish.LENGTH, update
                del self._requests[update.id]
                simulated.cached_tokens, simulated.num_preemptions = request.num_cached, request.num_preemptions
                self._on_end(simulated)
