"""CpuRanks: one of the processes that compute a model together on a CPU, and the pages that all of them map.

Rank 0 has the scheduler and the sampler. It writes a command into a shared page and rings; the other ranks carry it
out (`engine/rank_process.py`). Tapes gather values in shared memory, and their ops meet (`csrc/ranks.h`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.errors import RankLost
from quire.kernels.cpu.shared_pages import SharedPages
from quire.kernels.cpu.tape_memory import padded

NUM_WORDS = 1 << 15  # of a command
HEAD_ROWS = 64  # that the ranks multiply with the head at once

Floats = NDArray[np.float32]
Words = NDArray[np.int64]
Pair = tuple[int, int]


class Command(IntEnum):
    """What rank 0 has the others do."""

    STEP = 1  # run the tape
    ARGMAX = 2  # the largest logits of some rows
    LOGITS = 3
    COPY_BLOCKS = 4
    SWAP_OUT = 5
    SWAP_IN = 6
    MOVE_TOKENS = 7


class CpuRanks:
    """One rank's view of all ranks."""

    def __init__(
        self, module: Any, pages: SharedPages, rank: int, size: int, *, crowded: bool, equal_threads: bool = True
    ) -> None:
        """`crowded`: there are more threads than cores. `equal_threads`: all ranks have the same number of threads, so
        they cut a step into the same parts, and can share values in int8."""
        self.equal_threads = equal_threads
        self.rank = rank
        self.size = size
        self.pages = pages
        page = pages.allocate(module.RANK_PAGE_BYTES)
        self.native = module.Ranks(page.ctypes.data, rank, size, crowded)
        self._words: Words = pages.array((NUM_WORDS,), "int64")
        self._page = page  # stays mapped
        self.shared_head: SharedHead | None = None  # of the model, when it is built
        self.explain_loss: Callable[[], str] = lambda: "A rank ended"  # set by rank 0

    def all_gather(self, x: Any, first: int, width: int, reader: Any = None) -> Any:
        rounded = reader is not None and self.equal_threads and reader.reads_rounded
        return x.tape.all_gather(self, x, first, width, rounded=rounded)

    def gather_rows(self, x: Any, first: int) -> Any:
        return x.tape.gather_rows(self, x, first)

    def head(self, weight: Any, own: range, num_rows: int) -> SharedHead:
        self.shared_head = SharedHead(self, weight, own, num_rows)
        return self.shared_head

    # ── rank 0 ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def write(self, command: Command, words: Sequence[int]) -> None:
        """Write a command, when the one before it is done. `ring` or the C++ program give it."""
        self.wait()
        assert 2 + len(words) <= NUM_WORDS, len(words)
        self._words[: 2 + len(words)] = [command, len(words), *words]

    def give(self, command: Command, *words: int) -> None:
        self.write(command, words)
        self.native.ring()

    def give_pairs(self, command: Command, pairs: Sequence[Pair], *words: int) -> None:
        """`words` and then the pairs, in as many commands as they need."""
        most = (NUM_WORDS - 2 - len(words)) // 2
        for first in range(0, len(pairs), most):
            self.give(command, *words, *(number for pair in pairs[first : first + most] for number in pair))

    def wait(self) -> None:
        """Wait until the last command is done. Raises if a rank has ended."""
        self.native.wait_until_done()
        if self.native.broken:
            raise RankLost(
                f"{self.explain_loss()}, and the engine cannot go on without it. A server starts it again; otherwise "
                "make a new engine."
            )

    # ── other ranks ───────────────────────────────────────────────────────────────────────────────────────────────────

    def receive(self) -> tuple[Command, list[int]] | None:
        """The next command. None: there will be none."""
        self.native.wait_for_command()
        if self.native.broken:
            return None
        command, count = self._words[:2].tolist()
        return Command(command), self._words[2 : 2 + count].tolist()


class SharedHead:
    """The output matrix (lm_head), of which each rank has some rows. On rank 0 it is a `Weight`."""

    data = None

    def __init__(self, ranks: CpuRanks, weight: Any, own: range, num_rows: int) -> None:
        cols = weight.shape[1]
        self.shape = num_rows, cols
        self.own = own
        self._ranks, self._weight = ranks, weight
        self._states = ranks.pages.array((HEAD_ROWS, cols), "float32")
        self._tokens = ranks.pages.array((ranks.size, HEAD_ROWS), "int64")
        self._largest = ranks.pages.array((ranks.size, HEAD_ROWS), "float32")
        self._logits = ranks.pages.array((HEAD_ROWS, padded(num_rows)), "float32")

    @property
    def nbytes(self) -> int:
        num_bytes: int = self._weight.nbytes
        return num_bytes

    def argmax(self, x: Floats, rows: Sequence[int]) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        largest: list[float] = []
        for first in range(0, len(rows), HEAD_ROWS):
            count = self._give(Command.ARGMAX, x[list(rows[first : first + HEAD_ROWS])])
            self.find_largest(count)
            self._ranks.wait()
            found = merge_largest(self._tokens[:, :count], self._largest[:, :count])
            tokens += found[0].tolist()
            largest += found[1].tolist()
        return tokens, largest

    def matmul(self, x: Floats) -> Floats:
        """x [n, in] -> [n, rows], in memory of this process."""
        out = np.empty((len(x), padded(self.shape[0])), np.float32)[:, : self.shape[0]]
        for first in range(0, len(x), HEAD_ROWS):
            count = self._give(Command.LOGITS, x[first : first + HEAD_ROWS])
            part = out[first : first + count]
            self._weight.multiply(self._states[:count], part[:, self.own.start :])
            self._ranks.wait()
            part[:, self.own.stop :] = self._logits[:count, self.own.stop : self.shape[0]]
        return out

    def _give(self, command: Command, states: Floats) -> int:
        self._ranks.wait()
        self._states[: len(states)] = states
        self._ranks.give(command, len(states))
        return len(states)

    def find_largest(self, count: int) -> None:
        """This rank's largest logits of the shared states."""
        index, values = self._weight.argmax(self._states[:count], range(count))
        self._tokens[self._ranks.rank, :count] = np.add(index, self.own.start)
        self._largest[self._ranks.rank, :count] = values

    def compute_logits(self, count: int) -> None:
        """This rank's logits of the shared states."""
        self._weight.multiply(self._states[:count], self._logits[:count, self.own.start : self.own.stop])

    def rows(self, index: Any) -> Any:
        raise AssertionError("one rank has only some rows")

    def dense(self) -> Any:
        raise AssertionError("one rank has only some rows")


def merge_largest(tokens: Words, largest: Floats) -> tuple[Words, Floats]:
    """The largest of each column, and its token. Ranks have ascending tokens, so the first of equals is the lowest. NaN
    is the largest."""
    found, best = tokens[0].copy(), largest[0].copy()
    for other, values in zip(tokens[1:], largest[1:], strict=True):
        is_larger = ~np.isnan(best) & ~(values <= best)
        found[is_larger], best[is_larger] = other[is_larger], values[is_larger]
    return found, best


def to_pairs(words: Sequence[int]) -> list[Pair]:
    return list(zip(words[::2], words[1::2], strict=True))


def step_words(arguments: Sequence[Any], offset_of: Callable[[int], int]) -> list[int]:
    """The arguments of a step (`tape.step_arguments`) as words, with offsets in place of addresses."""
    num_tokens, num_rows, *addresses, groups, paths, path_stride = arguments
    words = [num_tokens, num_rows, *map(offset_of, addresses), offset_of(paths), path_stride, len(groups)]
    for tables, stride, slots in groups:
        words += [offset_of(tables), stride, offset_of(slots)]
    return words


def step_arguments_of(words: Sequence[int], base: int) -> tuple[Any, ...]:
    """The arguments again, where the pages begin at `base`."""

    def address_of(offset: int) -> int:
        return base + offset if offset else 0

    num_tokens, num_rows, *offsets, paths, path_stride, num_groups = words[:9]
    groups = [
        (address_of(tables), stride, address_of(slots))
        for tables, stride, slots in zip(words[9::3], words[10::3], words[11::3], strict=True)
    ]
    assert len(groups) == num_groups
    return num_tokens, num_rows, *map(address_of, offsets), groups, address_of(paths), path_stride
