"""Policies: who goes first, and when waiting requests may join. The scheduler is the same for all of them.

A batching policy is asked at every step how many requests may be admitted, also when none waits. Static and dynamic
batching are admission policies too: they let nobody in until the running batch has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

PRIORITY_POSITIONS = 10_000


class Batching(Protocol):
    def quota(self, num_waiting: int, num_running: int, oldest_wait_s: Callable[[], float]) -> int:
        """How many waiting requests may join now. Finding out how long the oldest has waited takes a look at all."""
        ...

    def admit(self) -> None:
        """One of them has joined."""
        ...


@dataclass(frozen=True, slots=True)
class Continuous:
    """Join at every step."""

    def quota(self, num_waiting: int, num_running: int, oldest_wait_s: Callable[[], float]) -> int:
        return num_waiting

    def admit(self) -> None:
        pass


@dataclass(slots=True)
class WaitingRatio:
    """Join when enough requests wait for the number that runs, or when each of those has got `max_waiting_tokens`.

    Running requests are held up less often, and by more prompts at a time. Who waits at that moment joins, in one step
    or, if there is no room, in the next ones. This is how TGI batches; the fields have its options' names.
    """

    waiting_served_ratio: float
    max_waiting_tokens: int
    _num_steps: int = 0  # since requests wait and nobody joined
    _num_open: int = 0  # requests that may join and have not yet

    def quota(self, num_waiting: int, num_running: int, oldest_wait_s: Callable[[], float]) -> int:
        self._num_steps = self._num_steps + 1 if num_waiting else 0
        if num_waiting >= self.waiting_served_ratio * num_running or self._num_steps > self.max_waiting_tokens:
            self._num_open = num_waiting
        self._num_open = min(self._num_open, num_waiting)
        return self._num_open

    def admit(self) -> None:
        self._num_steps = 0
        self._num_open -= 1


@dataclass(slots=True)
class Static:
    """Take what waits, up to a batch, and let it run to its end.

    A batch whose prompts do not fit into one step is completed by the next ones.
    """

    batch_size: int
    _num_open: int = 0  # requests of the batch that have not joined yet

    def quota(self, num_waiting: int, num_running: int, oldest_wait_s: Callable[[], float]) -> int:
        if not num_running:
            self._num_open = self.batch_size
        self._num_open = min(self._num_open, num_waiting)
        return self._num_open

    def admit(self) -> None:
        self._num_open -= 1


class Dynamic:
    """Like static, but wait for a full batch first, though never longer than `max_wait_s`."""

    def __init__(self, batch_size: int, max_wait_s: float) -> None:
        self.max_wait_s = max_wait_s
        self._batch = Static(batch_size)

    def quota(self, num_waiting: int, num_running: int, oldest_wait_s: Callable[[], float]) -> int:
        is_full = num_waiting >= self._batch.batch_size
        if num_waiting and not num_running and not is_full and oldest_wait_s() < self.max_wait_s:
            return 0
        return self._batch.quota(num_waiting, num_running, oldest_wait_s)

    def admit(self) -> None:
        self._batch.admit()


@dataclass(frozen=True, slots=True)
class Policy:
    """Batching and order.

    By priority, a lower number goes first. A level is worth `priority_positions` places in the queue rather than an
    absolute right of way: a request is overtaken by a bounded number of later ones, so nobody starves.
    """

    batching: Batching = field(default_factory=Continuous)
    order: Literal["fcfs", "priority"] = "fcfs"
    priority_positions: int = PRIORITY_POSITIONS

    def rank(self, place: int, priority: int) -> int:
        """What the queue is sorted by, smallest first."""
        return place + (priority * self.priority_positions if self.order == "priority" else 0)


class FairQueue:
    """Places in the queue, fair between tenants.

    A tenant's requests stand one behind the other; the first of one that was not waiting stands where the queue is
    served now. So with one tenant the order is that of arrival, and with several nobody waits for more than about as
    much of each other's work as there is of their own. Long prompts count for several places.
    """

    TOKENS_PER_POSITION = 1024
    MAX_IDLE = 1024  # tenants that are remembered although all their places have been served

    def __init__(self) -> None:
        self._served = 0
        self._last: dict[str, int] = {}
        self._num_waiting = 0  # tenants, when it was last looked

    def place(self, tenant: str, num_tokens: int) -> int:
        """Where a new request stands."""
        place = max(self._served, self._last.get(tenant, 0)) + 1
        self._last[tenant] = place + num_tokens // self.TOKENS_PER_POSITION
        return place

    def serve(self, place: int) -> None:
        """The request at this place runs."""
        self._served = max(self._served, place)
        if len(self._last) > 2 * self._num_waiting + self.MAX_IDLE:
            self._last = {tenant: last for tenant, last in self._last.items() if last > self._served}
            self._num_waiting = len(self._last)
