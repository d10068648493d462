"""Leap: several steps of a simulation at once while every running request only decodes, with the times of single steps.

Nothing arrives, ends, waits for room or is preempted in these steps, so a request changes only where it needs a block,
fills one, or leaves one behind its window. Between these events its tokens are counted, not appended. `simulator.py`
calls `leap` where `may_leap` allows it, and makes single steps elsewhere.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.capacity.step_cost import Cost, StepShape
from quire.core.plan import Plan
from quire.core.policy import Continuous
from quire.core.prefix_tree import first_block
from quire.core.request import Request
from quire.core.scheduler import Scheduler

MIN_STEPS = 2  # a leap has a cost of its own
NO_PLACES: dict[int, int] = {}


def may_leap(scheduler: Scheduler, in_flight: Sequence[tuple[float, Plan]], depth: int) -> bool:
    """Whether the next plans have one token for each running request, whatever their number."""
    running = scheduler.running
    if not running or len(in_flight) != depth - 1 or not admits_nothing(scheduler):
        return False
    if in_flight and not len(running) == len(in_flight[0][1]) == in_flight[0][1].num_tokens:
        return False
    num_ahead = depth - 1
    return all(
        request.num_in_flight == request.num_expected == num_ahead
        and len(request.tokens) + num_ahead - request.num_planned == 1
        for request in running
    )


def admits_nothing(scheduler: Scheduler) -> bool:
    """No request waits, or none can join because every row is taken. Other policies count steps of those that wait."""
    if not scheduler.num_waiting:
        return True
    return len(scheduler.running) >= scheduler.max_requests and isinstance(scheduler.policy.batching, Continuous)


@dataclass(slots=True)
class Row:
    """A running request. `done` counts the steps of the leap whose tokens it has."""

    request: Request
    index: int
    num_planned: int  # when the leap began
    num_computed: int
    done: int = 0

    def catch_up(self, num_steps: int, first_token: int) -> None:
        """Append the tokens of the first `num_steps` steps."""
        self.request.tokens += range(first_token + self.done, first_token + num_steps)
        self.done = num_steps
        self.request.num_computed = self.num_computed + num_steps


@dataclass(slots=True)
class Leap:
    """One leap. `times` are the ends of its steps."""

    scheduler: Scheduler
    cost: Cost
    first_token: int  # that its first step appends; later ones append the next numbers
    plan: Plan | None  # in flight when it begins
    rows: list[Row] = field(init=False)
    growing: defaultdict[int, list[Row]] = field(default_factory=lambda: defaultdict(list))  # by step
    changing: defaultdict[int, list[Row]] = field(default_factory=lambda: defaultdict(list))
    places: deque[dict[int, int]] = field(default_factory=deque)  # of rows in plans in flight; 0 if not listed
    times: list[float] = field(default_factory=list)
    busy_s: float = 0.0

    def __post_init__(self) -> None:
        self.rows = [
            Row(request, index, request.num_planned, request.num_computed)
            for index, request in enumerate(self.scheduler.running)
        ]
        if self.plan is not None:
            order = {id(request): place for place, request in enumerate(self.plan.requests)}
            self.places.append({row.index: order[id(row.request)] for row in self.rows})
        for row in self.rows:
            self.growing[row.request.capacity - row.num_planned].append(row)
            self._expect_change(row, 0)

    @property
    def max_steps(self) -> int:
        """Steps in which no request ends."""
        return min(row.request.max_len - len(row.request.tokens) for row in self.rows) - 1

    def run(self, now_s: float, until_s: float, ends: deque[float], num_steps: int) -> float:
        """Make up to `num_steps` steps before `until_s`. Returns the time then. `ends` are those of plans in flight."""
        depth = len(ends) + 1
        sums = KeySums(self.rows, self.scheduler.kv.windows)
        pairs = (0.0,) * len(sums.windows)
        pace, count = self.scheduler.pace, len(self.rows)
        for step in range(num_steps):
            if now_s >= until_s or not self._grow(step):
                break
            seconds = self.cost.seconds(StepShape(count, count, sums.at(step), pairs))
            pace.learn(0, seconds)
            self.busy_s += seconds
            ends.append((max(now_s, ends[-1]) if ends else now_s) + seconds)
            now_s = max(now_s, ends.popleft())
            self.times.append(now_s)
            places = self.places.popleft()
            if step in self.changing:
                self._change(step, places)
        self._finish(depth)
        return now_s

    def _grow(self, step: int) -> bool:
        """Allocate the blocks that rows need for this step. Returns False if there are too few. These rows are the last
        ones in its plan."""
        due, kv = self.growing.get(step), self.scheduler.kv
        if due is None:
            self.places.append(NO_PLACES)
            return True
        if len(due) * len(kv.windows) > kv.pool.num_free:
            return False
        self.places.append({row.index: 1 for row in due})
        del self.growing[step]
        due = sorted(due, key=lambda row: row.index)
        kv.begin_plan(self.scheduler.counters.steps + step + 1)
        for row in due:
            row.request.num_planned = row.num_planned + step
            has_grown = kv.grow(row.request, row.num_planned + step + 1, [])
            assert has_grown, "a row needs one block a group"
            self.growing[row.request.capacity - row.num_planned].append(row)
        return True

    def _change(self, step: int, places: dict[int, int]) -> None:
        """Publish full blocks and release those behind windows, as the commit of this step does."""
        kv = self.scheduler.kv
        for row in sorted(self.changing.pop(step), key=lambda row: (places.get(row.index, 0), row.index)):
            row.catch_up(step + 1, self.first_token)
            if row.request.num_computed >= row.request.publish_at:
                kv.publish(row.request, row.request.num_computed)
            if kv.has_windows:
                kv.trim(row.request)
            self._expect_change(row, step + 1)

    def _expect_change(self, row: Row, step: int) -> None:
        """Note the next step, from this one on, whose commit publishes or releases a block of the row."""
        end = row.num_computed + step + 1
        nexts = [max(end, row.request.publish_at)]
        kv = self.scheduler.kv
        for window in kv.windows:
            if window is not None:
                first = first_block(end - 1, window, kv.block_size)
                nexts.append(max(end, (first + 1) * kv.block_size + window - 1))
        self.changing[min(nexts) - row.num_computed - 1].append(row)

    def _finish(self, depth: int) -> None:
        num_steps, counters = len(self.times), self.scheduler.counters
        for row in self.rows:
            row.catch_up(num_steps, self.first_token)
            row.request.num_planned = row.num_planned + num_steps
        counters.steps += num_steps
        counters.computed_tokens += num_steps * len(self.rows)
        self.scheduler.kv.begin_plan(counters.steps)
        if self.plan is not None:
            self.plan.starts[:] = [start + num_steps for start in self.plan.starts]


class KeySums:
    """The keys that all rows read in each step, one sum a cache group."""

    def __init__(self, rows: Sequence[Row], windows: Sequence[int | None]) -> None:
        self.windows = windows
        self._starts = [row.num_planned + 1 for row in rows]
        self._sum, self._count = sum(self._starts), len(self._starts)
        self._has_windows = tuple(windows) != (None,)

    def at(self, step: int) -> tuple[float, ...]:
        whole = float(self._sum + step * self._count)
        if not self._has_windows:
            return (whole,)
        return tuple(whole if window is None else self._windowed(step, window) for window in self.windows)

    def _windowed(self, step: int, window: int) -> float:
        return float(sum(min(start + step, window) for start in self._starts))
