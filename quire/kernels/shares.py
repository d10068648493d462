"""Shares: which outputs and heads of a layer one rank computes, and what a layer needs of the other ranks.

With tensor parallelism each rank computes some outputs of every matrix, and each gathers the inputs that it needs from
all ranks. No sum is split, so every output has the bits that one rank alone computes. Layers call this while they are
built. A backend's `Ranks` is `Kernels.ranks`; `kernels/cpu/ranks.py` has the one of the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

PANEL = 16  # outputs that are not split
BLOCK = 32  # outputs that a product computes at once


class Ranks(Protocol):
    """The processes that compute one model together."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, x: Any, first: int, width: int, reader: Any = None) -> Any:
        """x [tokens, n]: this rank's columns from `first` on -> those of all ranks, [tokens, width].

        `reader` is the only Weight that is multiplied with the result, if it is known.
        """
        ...

    def gather_rows(self, x: Any, first: int) -> Any:
        """x [tokens, n], from an embedding with this rank's rows, from `first` on -> the rows of all tokens."""
        ...

    def head(self, weight: Any, own: range, num_rows: int) -> Any:
        """The output matrix of `num_rows` rows as a Weight. `weight` has this rank's rows of it."""
        ...


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The query heads that a rank computes, and the key heads that they read."""

    queries: range
    keys: range


def output_unit(count: int, size: int) -> int:
    """Outputs of a matrix that are not split: whole blocks, or panels where there are few."""
    return BLOCK if count >= 2 * BLOCK * size else PANEL


def share_outputs(count: int, rank: int, size: int) -> range:
    """A rank's outputs of a matrix with `count` outputs."""
    return share_units(count, rank, size, output_unit(count, size))


def own_outputs(count: int, ranks: Ranks | None) -> range:
    """The outputs that this rank computes."""
    return range(count) if ranks is None else share_outputs(count, ranks.rank, ranks.size)


def own_unit(count: int, ranks: Ranks | None) -> int:
    """The outputs of all ranks begin at multiples of it."""
    return count if ranks is None else output_unit(count, ranks.size)


def own_heads(num_heads: int, num_kv_heads: int, ranks: Ranks | None) -> HeadShare:
    """The heads that this rank computes."""
    if ranks is None:
        return HeadShare(range(num_heads), range(num_kv_heads))
    return share_heads(num_heads, num_kv_heads, ranks.rank, ranks.size)


def share_units(count: int, rank: int, size: int, unit: int = 1) -> range:
    """A share in multiples of `unit`. The last rank has what is left. Shares differ by at most one unit."""
    units = -(-count // unit)
    first, last = units * rank // size, units * (rank + 1) // size
    return range(first * unit, min(last * unit, count))


def share_heads(num_heads: int, num_kv_heads: int, rank: int, size: int) -> HeadShare:
    """With more ranks than key heads, several ranks have the same key head, and share its query heads."""
    group = num_heads // num_kv_heads
    if size <= num_kv_heads:
        keys = share_units(num_kv_heads, rank, size)
        return HeadShare(range(keys.start * group, keys.stop * group), keys)
    key = rank * num_kv_heads // size
    ranks = [each for each in range(size) if each * num_kv_heads // size == key]
    own = share_units(group, rank - ranks[0], len(ranks))
    return HeadShare(range(key * group + own.start, key * group + own.stop), range(key, key + 1))


def max_ranks(count: int) -> int:
    """How many ranks can share the outputs of a matrix."""
    return -(-count // PANEL)
