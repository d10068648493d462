"""Split-KV: contexts that several programs share. Each leaves its part in a workspace, and the last to do so joins
them, in their order: the sum does not depend on which was last.

For single queries `split_contexts` says which program takes what. It is worked out on the host for each step, so one
captured graph serves any mix of short and long contexts.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

PROGRAMS = 132 * 4  # with one query each: enough to keep an H200's multiprocessors reading
UNIT = 64  # keys; contexts are split at multiples of it
# Of a split: row, first key, end of keys, slot in the workspace, first slot of the row, splits of the row, end of the
# row's context, and the row's token in the step. All that a program asks for first lies in one sector of memory.
FIELDS = 8
NOBODY = -1  # the row of an entry that only fills the list up
SPARE_SPLITS = 16
ROW_PROGRAMS = PROGRAMS // 2  # of one row: with more, joining takes longer than they save


def split_contexts(firsts: NDArray[np.int64], ends: NDArray[np.int64], kv_heads: int, room: int) -> NDArray[np.int32]:
    """Cut rows that see keys firsts:ends into splits of about equal length, at most `room` of them -> [splits, FIELDS].

    A row that is cut has a slot for each of its splits; the others have none. `room` is `room_for_splits` of as many
    rows, or their number: with more, there would be more partials than `max_partials`. The longest come first: programs
    are started in this order, so the last ones to run are short. Rows' tokens are left out.
    """
    if not len(ends):
        return np.zeros((0, FIELDS), np.int32)
    skipped = firsts // UNIT
    units = np.maximum(-(-ends // UNIT) - skipped, 1)
    longest = find_longest(units, room)
    if room <= len(units) + SPARE_SPLITS:  # all are busy as it is, so only what would keep the others waiting is cut
        longest = max(longest, int(find_limit(len(units), kv_heads) * units.mean()))
    lengths = -(-units // -(-units // longest))
    counts = -(-units // lengths)
    total, before = int(counts.sum()), np.cumsum(counts) - counts
    splits = np.zeros((total, FIELDS), np.int32)
    rows = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(total) - before[rows]
    begins = (skipped[rows] + nth * lengths[rows]) * UNIT
    slots = np.where(counts > 1, counts, 0)
    first_slots = np.cumsum(slots) - slots
    splits[:, 0] = rows
    splits[:, 1] = begins
    splits[:, 2] = np.minimum(begins + lengths[rows] * UNIT, ends[rows])
    splits[:, 3] = first_slots[rows] + nth
    splits[:, 4] = first_slots[rows]
    splits[:, 5] = counts[rows]
    splits[:, 6] = ends[rows]
    return splits[np.argsort(splits[:, 1] - splits[:, 2], kind="stable")]


def find_longest(units: NDArray[np.int64], room: int) -> int:
    """The least length of splits with which there are no more of them than `room`."""
    assert len(units) <= room
    low, high = max(1, -(-int(units.sum()) // room)), int(units.max(initial=1))
    while low < high:
        middle = (low + high) // 2
        if int((-(-units // middle)).sum()) <= room:
            high = middle
        else:
            low = middle + 1
    return low


def find_limit(num_rows: int, kv_heads: int) -> float:
    """How many times as long as the others a row may be, where there are many. Where they run in one or two waves, the
    second ends sooner if none of them is long; later ones are started when any of the first has ended."""
    return 1.5 if num_rows * kv_heads <= 1.5 * PROGRAMS else 2.0


def room_for_splits(num_rows: int, kv_heads: int) -> int:
    """How many splits a step of so many rows may have. Few rows are cut until all multiprocessors read; many rows keep
    them busy by themselves, and a few splits more are for those that are much longer than the others."""
    return max(min(most_programs(kv_heads), num_rows * ROW_PROGRAMS // kv_heads), num_rows + SPARE_SPLITS)


def most_programs(kv_heads: int) -> int:
    return max(1, PROGRAMS // kv_heads)


def max_partials(kv_heads: int) -> int:
    """A row that is cut has two splits or more, and there are at most so many more splits than rows."""
    return 2 * max(most_programs(kv_heads), SPARE_SPLITS)


@triton.jit
def store_partial(
    parts, tops, arrived, slot, pair, count, top, mass, total, lanes, columns, is_query, inside,
    QUERIES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Leave what a program has found in its slot; whether it was the last of a pair's `count` to do so."""
    mine = slot * QUERIES + lanes
    tl.store(parts + mine[:, None] * WIDTH + columns[None, :], total, mask=inside)
    tl.store(tops + mine * 2, top, mask=is_query)
    tl.store(tops + mine * 2 + 1, mass, mask=is_query)
    tl.debug_barrier()
    is_last = tl.atomic_add(arrived + pair, 1, sem="acq_rel") == count - 1
    if is_last:
        tl.store(arrived + pair, 0)
    return is_last


@triton.jit
def merge_partials(
    parts, tops, first_part, stride, count, columns, is_query, inside, QUERIES: tl.constexpr, WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """What several programs have found for the same queries, in their order: sums of weights and weighted values.

    Parts lie `stride` queries apart; AT_ONCE of them are on their way together.
    """
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, WIDTH], tl.float32)
    for first in range(0, count, AT_ONCE):
        for nth in tl.static_range(AT_ONCE):
            is_there = first + nth < count
            its = first_part + (first + nth) * stride
            wanted = is_query & is_there
            its_top = tl.load(tops + its * 2, mask=wanted, other=float("-inf"), cache_modifier=".cg")
            its_mass = tl.load(tops + its * 2 + 1, mask=wanted, other=0.0, cache_modifier=".cg")
            at = parts + its[:, None] * WIDTH + columns[None, :]
            part = tl.load(at, mask=inside & is_there, other=0.0, cache_modifier=".cg")
            higher = tl.maximum(top, its_top)
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            fading, factor = tl.exp2(top - safe), tl.exp2(its_top - safe)
            mass = mass * fading + its_mass * factor
            total = total * fading[:, None] + part * factor[:, None]
            top = higher
    return mass, total


@cache
def workspace(user: str, slots: int, queries: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Room for so many parts, shared by all layers and steps, and how many have arrived of each pair.

    It never grows or moves: graphs point to it. Kernels of different users may run at the same time.
    """
    parts = torch.empty(slots * queries * width, dtype=torch.float32, device=device)
    tops = torch.empty(slots * queries * 2, dtype=torch.float32, device=device)
    return parts, tops, torch.zeros(slots, dtype=torch.int32, device=device)
