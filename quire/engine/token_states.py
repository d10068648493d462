"""What an EAGLE head needs to remember between steps: states of tokens that it has not computed yet, and which blocks
it has filled.

The head is asked for drafts now and then. So states are kept until then, up to a limit, and lost ones leave a gap that
no draft may depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quire.core.block_pool import BlockPool

Floats = NDArray[np.float32]
Table = Sequence[int | None]  # a request's blocks


@dataclass(slots=True)
class Run:
    """States of consecutive tokens of a request, from position `start` on. `parts` are [tokens, width] each."""

    start: int
    stop: int
    parts: list[Floats] = field(default_factory=list)

    def truncate(self, stop: int) -> None:
        """Drop the tokens from `stop` on."""
        while self.parts and self.stop > stop:
            excess, last = self.stop - stop, self.parts.pop()
            if excess < len(last):
                self.parts.append(last[: len(last) - excess])
            self.stop -= min(excess, len(last))


class TokenStates:
    """The states of requests' last computed tokens, in `max_bytes`. The oldest ones are dropped first."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._runs: dict[str, Run] = {}  # the one that grew last is the last
        self._max_bytes = max_bytes

    def add(self, request_id: str, start: int, states: Floats) -> None:
        """states [tokens, width] of the tokens from position `start` on. They are not copied."""
        run = self._take(request_id) or Run(start, start)
        run.truncate(start)
        if run.stop != start:
            run = Run(start, start)
        elif not run.parts:
            run.start = start
        run.parts.append(states)
        run.stop += len(states)
        self._put(request_id, run)
        while self.num_bytes > self._max_bytes:
            self._drop_oldest()

    def find(self, request_id: str, stop: int) -> Run | None:
        """The request's states, if they are those up to position `stop`."""
        run = self._runs.get(request_id)
        return run if run is not None and run.parts and run.stop == stop else None

    def keep_last(self, request_id: str) -> None:
        """Drop all states of a request but those of its last token."""
        run = self._take(request_id)
        assert run is not None
        last = run.parts[-1][-1:].copy()
        self._put(request_id, Run(run.stop - 1, run.stop, [last]))

    def finish(self, request_id: str) -> None:
        self._take(request_id)

    def reset(self) -> None:
        self._runs.clear()
        self.num_bytes = 0

    def _take(self, request_id: str) -> Run | None:
        run = self._runs.pop(request_id, None)
        self.num_bytes -= sum(part.nbytes for part in run.parts) if run is not None else 0
        return run

    def _put(self, request_id: str, run: Run) -> None:
        self._runs[request_id] = run
        self.num_bytes += sum(part.nbytes for part in run.parts)

    def _drop_oldest(self) -> None:
        request_id, run = next(iter(self._runs.items()))
        if len(run.parts) < 2:
            self._take(request_id)
            return
        dropped = run.parts.pop(0)
        run.start += len(dropped)
        self.num_bytes -= dropped.nbytes


class FilledBlocks:
    """How many of a block's first tokens have keys and values of the head.

    The keys are those of the tokens that the target has there: what it writes again is no longer filled, and a block
    that is allocated anew is empty. `pool` returns the block pool.
    """

    def __init__(self, block_size: int, pool: Callable[[], BlockPool]) -> None:
        self._block_size = block_size
        self._pool = pool
        self._counts: dict[int, tuple[int, int]] = {}  # by block: its number of allocations, and tokens

    def count(self, block: int | None) -> int:
        if block is None:
            return 0
        allocation, count = self._counts.get(block, (0, 0))
        return count if count and self._pool().num_allocations[block] == allocation else 0

    def fill(self, table: Table, start: int, stop: int) -> None:
        """The head has computed the tokens from `start` to `stop`, in order."""
        for block, first, last in self._spans(table, start, stop):
            assert first <= self.count(block)
            self._set(block, max(last, self.count(block)))

    def truncate(self, table: Table, start: int, stop: int) -> None:
        """The target writes the tokens from `start` to `stop`."""
        for block, first, _ in self._spans(table, start, stop):
            if self.count(block) > first:
                self._set(block, first)

    def copy(self, source: int, target: int) -> None:
        """All layers of a block are copied."""
        self._set(target, self.count(source))

    def find_stop(self, table: Table, start: int, stop: int) -> int:
        """The first token from `start` on that is not filled, at most `stop`."""
        size = self._block_size
        while start < stop and self.count(table[start // size]) > start % size:
            start = min(stop, start // size * size + self.count(table[start // size]))
        return start

    def find_begin(self, table: Table, stop: int) -> int:
        """The first token of the filled blocks in front of `stop`: the first of a block.

        It is above `stop` if tokens before it in its block are missing, or if its block is behind the window. Then the
        next block is the first to be filled.
        """
        index, offset = divmod(stop, self._block_size)
        if offset and self.count(table[index]) < offset:
            index, offset = index + 1, 0
        while not offset and index < len(table) and table[index] is None:
            index += 1
        if index * self._block_size > stop:
            return index * self._block_size
        while index and self.count(table[index - 1]) == self._block_size:
            index -= 1
        return index * self._block_size

    def reset(self) -> None:
        self._counts.clear()

    def _set(self, block: int, count: int) -> None:
        self._counts.pop(block, None)
        if count:
            self._counts[block] = self._pool().num_allocations[block], count

    def _spans(self, table: Table, start: int, stop: int) -> list[tuple[int, int, int]]:
        """The blocks of the tokens from `start` to `stop`, each with its first and last of them."""
        size, spans = self._block_size, []
        for index in range(start // size, -(-stop // size)):
            block = table[index]
            assert block is not None, "the block is behind the window"
            spans.append((block, max(0, start - index * size), min(size, stop - index * size)))
        return spans
