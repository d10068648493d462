"""Swap: room on the host for the blocks of preempted requests, and whether to use it.

It knows slots by number and seconds as plain floats; what a slot is and how long a copy takes, the engine knows. The
scheduler asks `stow` when a request gives its blocks back; the pairs that `hand_over` gives go out with the next plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from quire.core.request import Request

Pairs = list[tuple[int, int]]


@dataclass(slots=True)
class SwapCosts:
    """What brings a preempted request back, in seconds. Whoever runs the steps measures and writes; None is unknown."""

    copy_s: float | None = None  # for a block, to the host and back
    compute_s: float | None = None  # for a token

    def favour_copy(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether copying so many blocks is cheaper than computing so many tokens again."""
        if self.copy_s is None or self.compute_s is None:
            return False
        return num_blocks * self.copy_s < num_tokens * self.compute_s


@dataclass(frozen=True, slots=True)
class Stowed:
    """What lies on the host of a request: so many computed tokens, in slots that stand where its blocks stood."""

    num_computed: int
    tables: list[list[int | None]]  # a table for each group that grows; None where a block fell behind the window
    fixed_tables: list[list[int]]  # a table for each group that does not

    @property
    def slots(self) -> list[int]:
        fixed = [slot for table in self.fixed_tables for slot in table]
        return [slot for table in self.tables for slot in table if slot is not None] + fixed


class Swap:
    """Slots 0..num_slots-1. The lowest free ones are used first: memory above the highest so far is not needed yet."""

    def __init__(self, num_slots: int = 0, costs: SwapCosts | None = None) -> None:
        self.num_slots = num_slots
        self.costs = costs or SwapCosts()
        self._num_touched = 0
        self._freed: list[int] = []  # a heap, of those that have been used before
        self._outgoing: Pairs = []

    @property
    def num_free(self) -> int:
        return self.num_slots - self._num_touched + len(self._freed)

    def stow(self, request: Request, num_blocks: int) -> bool:
        """Have the first `num_blocks` entries of the request's tables copied to the host, if that pays and fits.

        Blocks of the encoder and the state are copied whole.
        """
        tables, num_computed = [table[:num_blocks] for table in request.tables], request.num_computed
        needed = sum(block is not None for table in tables for block in table) + sum(map(len, request.fixed_tables))
        if not num_computed or not needed or needed > self.num_free:
            return False
        if not self.costs.favour_copy(needed, num_computed + len(request.encoder_tokens)):
            return False
        slots = [[None if block is None else self._send(block) for block in table] for table in tables]
        fixed = [[self._send(block) for block in table] for table in request.fixed_tables]
        request.stowed = Stowed(num_computed, slots, fixed)
        return True

    def hand_over(self) -> Pairs:
        """The (block, slot) pairs that the plan now made must copy. Nothing was written to these blocks since."""
        pairs, self._outgoing = self._outgoing, []
        return pairs

    def free(self, request: Request) -> None:
        """The request has been given blocks to be filled from the host: a later plan may write to its slots."""
        if request.stowed is not None:
            for slot in request.stowed.slots:
                heapq.heappush(self._freed, slot)
            request.stowed = None

    def drop(self, request: Request) -> None:
        """Nobody will ask for what the request has on the host, so what is not there yet need not go either."""
        if request.stowed is not None and self._outgoing:
            dropped = set(request.stowed.slots)
            self._outgoing = [pair for pair in self._outgoing if pair[1] not in dropped]
        self.free(request)

    def reset(self) -> None:
        """All slots are free."""
        self._freed = list(range(self._num_touched))
        self._outgoing = []

    def distrust(self, slots: set[int], requests: Iterable[Request]) -> None:
        """What these slots hold is not known: who relies on one computes its tokens again."""
        for request in requests:
            if request.stowed is not None and not slots.isdisjoint(request.stowed.slots):
                self.drop(request)

    def _send(self, block: int) -> int:
        if self._freed:
            slot = heapq.heappop(self._freed)
        else:
            slot = self._num_touched
            self._num_touched += 1
        self._outgoing.append((block, slot))
        return slot
