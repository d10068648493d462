"""Simulator: the real Scheduler, KVCache and PrefixTree, with a clock that advances by the predicted cost of each step.

It computes no token: answers have the lengths that they are given. So queues, chunks of prompts, cache hits, evictions
and preemptions are those of an engine, as far as step times are right. One instance is one engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from quire.capacity.profile import CapacityProfile
from quire.capacity.step_cost import StepCost, shape_of
from quire.core.params import SamplingParams
from quire.core.plan import Plan, Sampled
from quire.core.policy import Policy
from quire.core.request import Finish, Request
from quire.core.step_costs import StepCosts
from quire.errors import PromptTooLong

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
    """One engine on a virtual clock."""

    def __init__(self, profile: CapacityProfile, policy: Policy | None = None, cost: StepCost | None = None) -> None:
        self.scheduler = profile.sizes.scheduler(policy)
        self.now_s = 0.0
        self.num_steps = 0
        self.busy_s = 0.0
        self._cost = cost or profile.cost
        self._max_len = profile.sizes.max_len
        self._depth = profile.sizes.depth
        self._costs = StepCosts(self.scheduler.swap.costs, self.scheduler.pace, self.scheduler.max_tokens_per_step)
        self._requests: dict[str, SimulatedRequest] = {}
        self._engine_requests: dict[str, Request] = {}
        self._not_started: set[str] = set()

    def run(self, arrivals: Iterable[Arrival]) -> list[SimulatedRequest]:
        """Simulate until every request has ended. `arrivals` are in the order of their times."""
        finished: list[SimulatedRequest] = []
        in_flight: deque[tuple[float, Plan]] = deque()  # plans and their ends, the oldest first
        waiting = PeekableArrivals(arrivals)
        while waiting.next_s is not None or self.scheduler.has_work or in_flight:
            for arrival in waiting.until(self.now_s):
                if (refused := self._add(arrival)) is not None:
                    finished.append(refused)
            plan = self._schedule(in_flight)
            if plan is not None:
                self._launch(plan, in_flight)
            if in_flight and (plan is None or len(in_flight) >= self._depth):
                end_s, oldest = in_flight.popleft()
                self.now_s = max(self.now_s, end_s)
                finished += self._commit(oldest)
            elif plan is None:
                self._advance(waiting.next_s)
        return sorted(finished, key=lambda request: request.number)

    def _add(self, arrival: Arrival) -> SimulatedRequest | None:
        """Queue a request. Returns it if it is refused."""
        number = len(self._requests)
        name = str(number)
        simulated = SimulatedRequest(number, arrival.at_s, len(arrival.prompt), arrival.output_tokens)
        self._requests[name] = simulated
        total = len(arrival.prompt) + arrival.output_tokens
        if total > self._max_len:
            simulated.refused = f"{total:,} tokens are more than {self._max_len:,}, the longest request"
            return simulated
        request = Request(
            name,
            arrival.prompt,
            SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True),
            max_tokens=arrival.output_tokens,
            tenant=arrival.tenant,
        )
        try:
            self.scheduler.add(request, arrival.at_s)
        except PromptTooLong as error:
            simulated.refused = str(error)
            return simulated
        self._engine_requests[name] = request
        self._not_started.add(name)
        return None

    def _schedule(self, in_flight: deque[tuple[float, Plan]]) -> Plan | None:
        if not self.scheduler.has_work or len(in_flight) >= self._depth:
            return None
        return self.scheduler.schedule(self.now_s)

    def _launch(self, plan: Plan, in_flight: deque[tuple[float, Plan]]) -> None:
        """The step begins when the one before it ends."""
        seconds = self._cost.seconds(shape_of(plan, self._cost.windows))
        begin_s = max(self.now_s, in_flight[-1][0]) if in_flight else self.now_s
        in_flight.append((begin_s + seconds, plan))
        self._note_starts(plan, begin_s)
        self._costs.learn(plan, seconds)
        self.num_steps += 1
        self.busy_s += seconds

    def _note_starts(self, plan: Plan, begin_s: float) -> None:
        if not self._not_started:
            return
        for name in self._not_started.intersection(request.id for request in plan.requests):
            self._not_started.discard(name)
            self._requests[name].started_s = begin_s

    def _commit(self, plan: Plan) -> list[SimulatedRequest]:
        """Give each row its token. Returns the requests that ended."""
        tokens = [[SAMPLED_TOKEN + self.num_steps] if count else [] for count in plan.yields]
        ended = []
        for update in self.scheduler.commit(plan, Sampled(tokens)):
            simulated = self._requests[update.id]
            simulated.times += [self.now_s] * len(update.tokens)
            if update.finish:
                assert update.finish is Finish.LENGTH, update
                request = self._engine_requests.pop(update.id)
                simulated.cached_tokens, simulated.num_preemptions = request.num_cached, request.num_preemptions
                ended.append(simulated)
        return ended

    def _advance(self, next_s: float | None) -> None:
        """Nothing can be computed: go to the next arrival, or to the next look of a batching policy."""
        if self.scheduler.has_work:
            later_s = self.now_s + WAIT_S
            self.now_s = later_s if next_s is None else min(later_s, max(self.now_s, next_s))
        elif next_s is not None:
            self.now_s = max(self.now_s, next_s)


class PeekableArrivals:
    """Arrivals, one of which is known before its time."""

    def __init__(self, arrivals: Iterable[Arrival]) -> None:
        self._arrivals = iter(arrivals)
        self._next: Arrival | None = next(self._arrivals, None)

    @property
    def next_s(self) -> float | None:
        return self._next.at_s if self._next is not None else None

    def until(self, now_s: float) -> Iterator[Arrival]:
        """Those that have arrived."""
        while self._next is not None and self._next.at_s <= now_s:
            arrival, self._next = self._next, next(self._arrivals, None)
            assert self._next is None or self._next.at_s >= arrival.at_s, "arrivals are in the order of their times"
            yield arrival
