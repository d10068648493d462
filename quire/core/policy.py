"""Policies: who goes first, and when waiting requests may join. The scheduler is the same for all of them.

A batching policy is asked once a step how many requests may be admitted. Static and dynamic batching are admission
policies too: they let nobody in until the running batch has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

PRIORITY_PLACES = 10_000


class Batching(Protocol):
    @property
    def whole(self) -> bool:
        """Whether a batch is formed at once, even if the step has tokens for its first requests only."""
        ...

    def quota(self, num_waiting: int, num_running: int, oldest_wait_s: Callable[[], float]) -> int:
        """How many waiting requests may join now. Finding out how long the oldest has waited takes a look at all."""
        ...


@dataclass(frozen=True, slots=True)
class Continuous:
    """Join at every step."""

    whole: ClassVar[bool] = False

    def quota(self, num_waiting: int, num_running: int, oldest_wait_s: Callable[[], float]) -> int:
        return num_waiting


@dataclass(frozen=True, slots=True)
class Static:
    """Take what waits, up to a batch, and let it run to its end."""

    whole: ClassVar[bool] = True
    batch_size: int

    def quota(self, num_waiting: int, num_running: int, oldest_wait_s: Callable[[], float]) -> int:
        return 0 if num_running else self.batch_size


@dataclass(frozen=True, slots=True)
class Dynamic:
    """Like static, but wait for a full batch first, though never longer than `max_wait_s`."""

    whole: ClassVar[bool] = True
    batch_size: int
    max_wait_s: float

    def quota(self, num_waiting: int, num_running: int, oldest_wait_s: Callable[[], float]) -> int:
        if num_running or (num_waiting < self.batch_size and oldest_wait_s() < self.max_wait_s):
            return 0
        return self.batch_size


@dataclass(frozen=True, slots=True)
class Policy:
    """Batching and order.

    By priority, a lower number goes first. A level is worth `priority_places` places in the queue rather than an
    absolute right of way: a request is overtaken by a bounded number of later ones, so nobody starves.
    """

    batching: Batching = Continuous()
    order: Literal["fcfs", "priority"] = "fcfs"
    priority_places: int = PRIORITY_PLACES

    def rank(self, place: int, priority: int) -> int:
        """What the queue is sorted by, smallest first."""
        return place + (priority * self.priority_places if self.order == "priority" else 0)


class Turns:
    """Places in the queue, fair between tenants.

    A tenant's requests stand one behind the other; the first of one that was not waiting stands where the queue is
    served now. So with one tenant the order is that of arrival, and with several nobody waits for more than about as
    much of each other's work as there is of their own. Long prompts count for several places.
    """

    TOKENS_IN_PLACE = 1024
    MAX_IDLE = 1024  # tenants that are remembered although all their places have been served

    def __init__(self) -> None:
        self._served = 0
        self._last: dict[str, int] = {}
        self._num_waiting = 0  # tenants, when it was last looked

    def place(self, tenant: str, num_tokens: int) -> int:
        """Where a new request stands."""
        place = max(self._served, self._last.get(tenant, 0)) + 1
        self._last[tenant] = place + num_tokens // self.TOKENS_IN_PLACE
        return place

    def serve(self, place: int) -> None:
        """The request at this place runs."""
        self._served = max(self._served, place)
        if len(self._last) > 2 * self._num_waiting + self.MAX_IDLE:
            self._last = {tenant: last for tenant, last in self._last.items() if last > self._served}
            self._num_waiting = len(self._last)
