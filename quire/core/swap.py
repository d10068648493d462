"""Swap: host blocks for the blocks of preempted requests, and the choice between swapping and recomputing.

Host blocks are numbers here and costs are seconds. The engine has the memory and measures the costs. The scheduler
calls `swap_out` when it preempts a request. The pairs that `take_swap_out` returns are part of the next plan.

A request that comes from another engine begins with host blocks too: they are staged while their contents arrive.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from quire.core.request import Request

Pairs = list[tuple[int, int]]


@dataclass(slots=True)
class SwapCosts:
    """What it costs to resume a preempted request, in seconds. The engine measures it. None is unknown."""

    copy_s: float | None = None  # to copy a block to the host and back
    compute_s: float | None = None  # to compute a token

    def is_copy_cheaper(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether copying `num_blocks` is cheaper than recomputing `num_tokens`."""
        if self.copy_s is None or self.compute_s is None:
            return False
        return num_blocks * self.copy_s < num_tokens * self.compute_s


@dataclass(frozen=True, slots=True)
class SwappedOut:
    """A request's host blocks, in tables of the same shape as its block tables."""

    num_computed: int
    tables: list[list[int | None]]  # a table for each group that grows; None where a block is behind the window
    fixed_tables: list[list[int]]  # a table for each group that does not

    @property
    def host_blocks(self) -> list[int]:
        fixed = [host_block for table in self.fixed_tables for host_block in table]
        return [host_block for table in self.tables for host_block in table if host_block is not None] + fixed


class Swap:
    """Host blocks. The lowest free one is used first, so the engine allocates host memory only up to the highest one
    used.

    Preempted requests get at most `num_host_blocks` of them. There are `num_import_blocks` more for requests that come
    from other engines.
    """

    def __init__(self, num_host_blocks: int = 0, costs: SwapCosts | None = None, num_import_blocks: int = 0) -> None:
        self.num_host_blocks = num_host_blocks
        self.num_import_blocks = num_import_blocks
        self.costs = costs or SwapCosts()
        self.staged: dict[str, SwappedOut] = {}  # of requests that are on their way to this engine
        self._num_ever_used = 0
        self._freed: list[int] = []  # a heap: free host blocks below _num_ever_used
        self._pending_swap_out: Pairs = []

    @property
    def num_free(self) -> int:
        """Host blocks left for preempted requests. Below 0 if imported requests hold more than there are for them."""
        return self.num_host_blocks - self._num_ever_used + len(self._freed)

    def swap_out(self, request: Request, num_blocks: int, copies: Sequence[tuple[int, int]] = ()) -> bool:
        """Swap out the first `num_blocks` blocks of each table, if they fit and copying is cheaper than recomputing.

        Encoder and state blocks are all swapped out. Returns whether the request was swapped out. `copies` are those of
        the plan being made. A plan swaps out before it copies, so the source is swapped out in place of the target.
        """
        tables, num_computed = [table[:num_blocks] for table in request.tables], request.num_computed
        needed = sum(block is not None for table in tables for block in table) + sum(map(len, request.fixed_tables))
        if not num_computed or not needed or needed > self.num_free:
            return False
        if not self.costs.is_copy_cheaper(needed, num_computed + len(request.encoder_tokens)):
            return False
        sources = {target: source for source, target in copies}
        host_blocks = [
            [None if block is None else self._swap_out_block(find_source(block, sources)) for block in table]
            for table in tables
        ]
        fixed = [[self._swap_out_block(block) for block in table] for table in request.fixed_tables]
        request.swapped_out = SwappedOut(num_computed, host_blocks, fixed)
        return True

    def take_swap_out(self) -> Pairs:
        """The pending (block, host_block) pairs, for the plan being made. No plan has written to these blocks since."""
        pairs, self._pending_swap_out = self._pending_swap_out, []
        return pairs

    @property
    def pending_sources(self) -> dict[int, int]:
        """The blocks that still have the contents of host blocks whose copies no plan has made yet."""
        return {host_block: block for block, host_block in self._pending_swap_out}

    def free(self, request: Request) -> None:
        """The request was swapped in. A later plan may write to its host blocks."""
        if request.swapped_out is not None:
            self._free_blocks(request.swapped_out)
            request.swapped_out = None

    def stage(self, name: str, cached: SwappedOut) -> SwappedOut | None:
        """Allocate host blocks for a request that comes from another engine. None if there is no room.

        The tables of `cached` show where it has blocks; their numbers are the other engine's.
        """
        assert name not in self.staged
        if len(cached.host_blocks) > self.num_free + self.num_import_blocks:
            return None
        tables = [[None if block is None else self._take() for block in table] for table in cached.tables]
        fixed = [[self._take() for _ in table] for table in cached.fixed_tables]
        self.staged[name] = SwappedOut(cached.num_computed, tables, fixed)
        return self.staged[name]

    def take_staged(self, name: str) -> SwappedOut | None:
        """The host blocks of a request that has arrived. The caller gives them to it."""
        return self.staged.pop(name, None)

    def drop_staged(self, name: str) -> None:
        """The request does not come."""
        if (staged := self.take_staged(name)) is not None:
            self._free_blocks(staged)

    def drop(self, request: Request) -> None:
        """The request will not be swapped in. Its pending copies are dropped too."""
        if request.swapped_out is not None and self._pending_swap_out:
            dropped = set(request.swapped_out.host_blocks)
            self._pending_swap_out = [pair for pair in self._pending_swap_out if pair[1] not in dropped]
        self.free(request)

    def reset(self) -> None:
        """All host blocks are free."""
        self._freed = list(range(self._num_ever_used))
        self._pending_swap_out = []
        self.staged.clear()

    def invalidate(self, host_blocks: set[int], requests: Iterable[Request]) -> None:
        """Drop the swapped-out blocks of requests that have one of `host_blocks`. These requests are recomputed."""
        for request in requests:
            if request.swapped_out is not None and not host_blocks.isdisjoint(request.swapped_out.host_blocks):
                self.drop(request)

    def _swap_out_block(self, block: int) -> int:
        host_block = self._take()
        self._pending_swap_out.append((block, host_block))
        return host_block

    def _take(self) -> int:
        if self._freed:
            return heapq.heappop(self._freed)
        self._num_ever_used += 1
        return self._num_ever_used - 1

    def _free_blocks(self, swapped_out: SwappedOut) -> None:
        for host_block in swapped_out.host_blocks:
            heapq.heappush(self._freed, host_block)


def find_source(block: int, sources: Mapping[int, int]) -> int:
    """The block that has a block's content before a plan's copies are made."""
    while block in sources:
        block = sources[block]
    return block
