"""Policies: the order of waiting requests, and when they may be admitted. The scheduler is the same for all of them.

The scheduler calls `Batching.quota` at every step, also when no request waits. Static and dynamic batching are
admission policies too: they admit no request until the running batch has ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

PRIORITY_POSITIONS = 10_000


@dataclass(frozen=True, slots=True)
class Hold:
    """Why a policy admits no request now, and for how long if only time is missing. An empty reason: it admits."""

    reason: str = ""
    seconds: float | None = None


class Batching(Protocol):
    def quota(self, num_waiting: int, num_running: int, oldest_wait_s: Callable[[], float]) -> int:
        """How many waiting requests may be admitted now. `oldest_wait_s` is a function because it scans all of them."""
        ...

    def admit(self) -> None:
        """A request has been admitted."""
        ...

    def explain(self, num_waiting: int, num_running: int, oldest_wait_s: Callable[[], float]) -> Hold:
        """Why the next call of `quota` with these arguments returns 0. It changes nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Continuous:
    """Admit requests at every step."""

    def quota(self, num_waiting: int, num_running: int, oldest_wait_s: Callable[[], float]) -> int:
        return num_waiting

    def admit(self) -> None:
        pass

    def explain(self, num_waiting: int, num_running: int, oldest_wait_s: Callable[[], float]) -> Hold:
        return Hold()


@dataclass(slots=True)
class WaitingRatio:
    """Admit requests when enough of them wait relative to those running, or after `max_waiting_tokens` steps.

    Running requests are interrupted less often, by more prompts at a time. All requests that wait at that moment are
    admitted, over several steps if one is too small. TGI batches this way, and the fields are named like its options.
    """

    waiting_served_ratio: float
    max_waiting_tokens: int
    _num_steps: int = 0  # with requests waiting, since the last admission
    _num_open: int = 0  # requests that may still be admitted

    def quota(self, num_waiting: int, num_running: int, oldest_wait_s: Callable[[], float]) -> int:
        self._num_steps = self._num_steps + 1 if num_waiting else 0
        if num_waiting >= self.waiting_served_ratio * num_running or self._num_steps > self.max_waiting_tokens:
            self._num_open = num_waiting
        self._num_open = min(self._num_open, num_waiting)
        return self._num_open

    def admit(self) -> None:
        self._num_steps = 0
        self._num_open -= 1

    def explain(self, num_waiting: int, num_running: int, oldest_wait_s: Callable[[], float]) -> Hold:
        needed = math.ceil(self.waiting_served_ratio * num_running)
        if self._num_open or num_waiting >= needed or self._num_steps >= self.max_waiting_tokens:
            return Hold()
        return Hold(
            f"batching by ratio: {num_waiting:,} wait and {num_running:,} run; {needed:,} have to wait "
            f"({self.waiting_served_ratio:g} for each that runs), or {self.max_waiting_tokens - self._num_steps:,} "
            "steps to pass"
        )


@dataclass(slots=True)
class Static:
    """Admit a batch of waiting requests, and the next one when all of them have ended.

    A batch whose prompts do not fit into one step is admitted over several.
    """

    batch_size: int
    _num_open: int = 0  # requests of the batch that may still be admitted

    def quota(self, num_waiting: int, num_running: int, oldest_wait_s: Callable[[], float]) -> int:
        if not num_running:
            self._num_open = self.batch_size
        self._num_open = min(self._num_open, num_waiting)
        return self._num_open

    def admit(self) -> None:
        self._num_open -= 1

    def explain(self, num_waiting: int, num_running: int, oldest_wait_s: Callable[[], float]) -> Hold:
        if not num_running or self._num_open:
            return Hold()
        return Hold(f"static batching: {num_running:,} of the batch before still run")


class Dynamic:
    """Like Static, but admits a batch only when it is full or its oldest request has waited `max_wait_s`."""

    def __init__(self, batch_size: int, max_wait_s: float) -> None:
        self.max_wait_s = max_wait_s
        self._batch = Static(batch_size)

    def quota(self, num_waiting: int, num_running: int, oldest_wait_s: Callable[[], float]) -> int:
        if self._gathers(num_waiting, num_running) and oldest_wait_s() < self.max_wait_s:
            return 0
        return self._batch.quota(num_waiting, num_running, oldest_wait_s)

    def admit(self) -> None:
        self._batch.admit()

    def explain(self, num_waiting: int, num_running: int, oldest_wait_s: Callable[[], float]) -> Hold:
        if not self._gathers(num_waiting, num_running):
            return self._batch.explain(num_waiting, num_running, oldest_wait_s)
        if (left_s := self.max_wait_s - oldest_wait_s()) <= 0:
            return Hold()
        return Hold(
            f"dynamic batching: {num_waiting:,} of {self._batch.batch_size:,} wait, or {left_s:.2f} s have to pass",
            left_s,
        )

    def _gathers(self, num_waiting: int, num_running: int) -> bool:
        """Whether a batch is being gathered, which is not full."""
        return bool(num_waiting) and not num_running and num_waiting < self._batch.batch_size


@dataclass(frozen=True, slots=True)
class Policy:
    """Batching and order.

    With order "priority", a lower number goes first. One level moves a request by `priority_positions` queue positions.
    So only a bounded number of later requests can overtake a request, and none starves.
    """

    batching: Batching = field(default_factory=Continuous)
    order: Literal["fcfs", "priority"] = "fcfs"
    priority_positions: int = PRIORITY_POSITIONS

    def sort_key(self, queue_position: int, priority: int) -> int:
        """Requests are sorted by this key, the smallest first."""
        return queue_position + (priority * self.priority_positions if self.order == "priority" else 0)


class FairQueue:
    """Assigns queue positions that are fair between tenants. Requests of several tenants may have the same position.

    Each tenant has its own sequence of positions, which starts after the last position served if none of its requests
    waits. A long prompt takes several positions. So with one tenant the order is that of arrival. With several, a
    request waits for about as much work of each other tenant as of its own.
    """

    TOKENS_PER_POSITION = 1024
    MAX_IDLE_TENANTS = 1024  # tenants that are kept although all their positions have been served

    def __init__(self) -> None:
        self._last_served = 0
        self._last_assigned: dict[str, int] = {}  # by tenant
        self._num_waiting_tenants = 0  # at the last removal of idle tenants

    def assign(self, tenant: str, num_tokens: int) -> int:
        """The queue position of a new request."""
        queue_position = max(self._last_served, self._last_assigned.get(tenant, 0)) + 1
        self._last_assigned[tenant] = queue_position + num_tokens // self.TOKENS_PER_POSITION
        return queue_position

    def mark_served(self, queue_position: int) -> None:
        """The request at this position has been admitted."""
        self._last_served = max(self._last_served, queue_position)
        if len(self._last_assigned) > 2 * self._num_waiting_tenants + self.MAX_IDLE_TENANTS:
            waiting = {tenant: last for tenant, last in self._last_assigned.items() if last > self._last_served}
            self._last_assigned, self._num_waiting_tenants = waiting, len(waiting)
