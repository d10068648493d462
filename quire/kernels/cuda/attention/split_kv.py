"""Split-KV: several programs share a context. Each stores a partial result in a workspace, and the last one merges
them. They are merged in order, so the result does not depend on which program is last.

For single queries `split_contexts` assigns splits to programs. The host computes it for each step, so one captured
graph serves any mix of short and long contexts.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

PROGRAMS = 132 * 4  # with one query each: enough to saturate the memory of an H200
UNIT = 64  # keys; contexts are split at multiples of it
# Of a split: row, first key, end of keys, index of its partial in the workspace, index of the row's first partial,
# number of the row's splits, end of the row's context, index of the row's token in the step. They fill a memory sector.
FIELDS = 8
PADDING_ROW = -1  # the row of a padding entry
SPARE_SPLITS = 16
ROW_PROGRAMS = PROGRAMS // 2  # of one row: with more, merging takes longer than the splits save


def split_contexts(
    firsts: NDArray[np.int64], ends: NDArray[np.int64], kv_heads: int, capacity: int
) -> NDArray[np.int32]:
    """Cut rows that see keys firsts:ends into at most `capacity` splits of about equal length -> [splits, FIELDS].

    Only rows with several splits have partials. `capacity` is `max_splits` of the rows, or their number; a larger one
    would allow more partials than `max_partials`. The longest splits come first: programs start in this order, so the
    last ones to run are short. The token field is 0.
    """
    if not len(ends):
        return np.zeros((0, FIELDS), np.int32)
    skipped = firsts // UNIT
    units = np.maximum(-(-ends // UNIT) - skipped, 1)
    longest = find_longest(units, capacity)
    are_many = 4 * len(units) * kv_heads >= 3 * PROGRAMS
    if are_many and capacity <= len(units) + SPARE_SPLITS:  # rows alone fill the GPU: cut those far above the mean
        longest = max(longest, int(find_limit(len(units), kv_heads) * units.mean()))
    lengths = -(-units // -(-units // longest))
    counts = -(-units // lengths)
    total, before = int(counts.sum()), np.cumsum(counts) - counts
    splits = np.zeros((total, FIELDS), np.int32)
    rows = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(total) - before[rows]
    begins = (skipped[rows] + nth * lengths[rows]) * UNIT
    partials = np.where(counts > 1, counts, 0)
    first_partials = np.cumsum(partials) - partials
    splits[:, 0] = rows
    splits[:, 1] = begins
    splits[:, 2] = np.minimum(begins + lengths[rows] * UNIT, ends[rows])
    splits[:, 3] = first_partials[rows] + nth
    splits[:, 4] = first_partials[rows]
    splits[:, 5] = counts[rows]
    splits[:, 6] = ends[rows]
    return splits[np.argsort(splits[:, 1] - splits[:, 2], kind="stable")]


def find_longest(units: NDArray[np.int64], capacity: int) -> int:
    """The smallest maximum length of a split that gives at most `capacity` splits."""
    assert len(units) <= capacity
    low, high = max(1, -(-int(units.sum()) // capacity)), int(units.max(initial=1))
    while low < high:
        middle = (low + high) // 2
        if int((-(-units // middle)).sum()) <= capacity:
            high = middle
        else:
            low = middle + 1
    return low


def find_limit(num_rows: int, kv_heads: int) -> float:
    """The maximum length of an uncut row, relative to the mean, if there are many rows. With one or two waves of
    programs a long row delays the end more; with more waves a program starts as soon as another ends."""
    return 1.5 if num_rows * kv_heads <= 1.5 * PROGRAMS else 2.0


def max_splits(num_rows: int, kv_heads: int) -> int:
    """The maximum number of splits of a step with `num_rows` rows. Few rows are cut until they fill the GPU. Many rows
    fill it alone; they get SPARE_SPLITS more for rows that are much longer than the others."""
    return max(min(num_splits_to_fill(kv_heads), num_rows * ROW_PROGRAMS // kv_heads), num_rows + SPARE_SPLITS)


def num_splits_to_fill(kv_heads: int) -> int:
    """How many splits fill the GPU."""
    return max(1, PROGRAMS // kv_heads)


def max_partials(kv_heads: int) -> int:
    """The maximum number of partials. Cutting adds at most half as many splits, and a cut row has at least two."""
    return 2 * max(num_splits_to_fill(kv_heads), SPARE_SPLITS)


@triton.jit
def store_partial(
    partials, tops, arrived, partial, pair, count, top, mass, total, lanes, columns, is_query, inside,
    QUERIES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store a program's partial result. True if it is the last of the pair's `count` programs."""
    index = partial * QUERIES + lanes
    tl.store(partials + index[:, None] * WIDTH + columns[None, :], total, mask=inside)
    tl.store(tops + index * 2, top, mask=is_query)
    tl.store(tops + index * 2 + 1, mass, mask=is_query)
    tl.debug_barrier()
    is_last = tl.atomic_add(arrived + pair, 1, sem="acq_rel") == count - 1
    if is_last:
        tl.store(arrived + pair, 0)
    return is_last


@triton.jit
def merge_partials(
    partials, tops, first_index, stride, count, columns, is_query, inside, QUERIES: tl.constexpr, WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Merge partial results of the same queries, in order. Returns the largest scores, the sums of weights and of
    weighted values.

    Partials are `stride` queries apart. AT_ONCE of them are loaded together.
    """
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, WIDTH], tl.float32)
    for first in range(0, count, AT_ONCE):
        for nth in tl.static_range(AT_ONCE):
            exists = first + nth < count
            index = first_index + (first + nth) * stride
            mask = is_query & exists
            partial_top = tl.load(tops + index * 2, mask=mask, other=float("-inf"), cache_modifier=".cg")
            partial_mass = tl.load(tops + index * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
            ptrs = partials + index[:, None] * WIDTH + columns[None, :]
            partial = tl.load(ptrs, mask=inside & exists, other=0.0, cache_modifier=".cg")
            higher = tl.maximum(top, partial_top)
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            rescale, factor = tl.exp2(top - safe), tl.exp2(partial_top - safe)
            mass = mass * rescale + partial_mass * factor
            total = total * rescale[:, None] + partial * factor[:, None]
            top = higher
    return top, mass, total


@cache
def workspace(
    user: str, num_partials: int, queries: int, width: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Partials, their largest scores and sums of weights, and counters of stored partials, for all layers and steps.

    The workspace never grows or moves: graphs point to it. Each user has its own, because kernels of different users
    may run at the same time.
    """
    partials = torch.empty(num_partials * queries * width, dtype=torch.float32, device=device)
    tops = torch.empty(num_partials * queries * 2, dtype=torch.float32, device=device)
    return partials, tops, torch.zeros(num_partials, dtype=torch.int32, device=device)
