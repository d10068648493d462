"""What each program of `varlen` takes of a step: items, which are tiles of queries and their stretches of keys.

Worked out on the host for each step, with numpy. Whether `varlen` can be used at all is said here too, since importing
it takes a Triton that has Gluon.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from quire.kernels.cuda.attention.scoring import Scoring
from quire.kernels.paging import LayerCache

H200_PROGRAMS = 132
PART_UNITS = 2 * H200_PROGRAMS  # for which the workspace has room
LEAST_KEYS = 512  # of a part
TILE = 128  # packed rows
KEYS = 128  # of a tile
STAGES = {64: 4, 128: 2}  # by the heads' dimension: tiles of keys, and of values, in shared memory
PAGES = (16, 32, 64, 128)  # tokens in a block of the cache
ITEM_FIELDS = 7  # row, first packed row, first key, end of keys, part, parts, slot


def suits(dtype: torch.dtype, cache: LayerCache, scoring: Scoring) -> bool:
    """Whether queries of a type can be computed here: on Hopper, in half precision, with plain scores or a window."""
    page, dim = cache.k.shape[2:]
    is_half = dtype in (torch.bfloat16, torch.float16) and cache.k.dtype == dtype
    is_plain = scoring.slopes is None and scoring.softcap is None
    return is_half and is_plain and dim in STAGES and page in PAGES and is_hopper()


@cache
def is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@cache
def num_programs() -> int:
    """As many as the GPU has multiprocessors; each takes one whole."""
    if not torch.cuda.is_available():
        return H200_PROGRAMS
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def room_for(num_tokens: int, num_rows: int, group: int, kv_heads: int) -> int:
    """More items than a step of so many tokens and rows can have."""
    return num_tokens * group // TILE + num_rows + PART_UNITS // kv_heads


def plan_items(
    counts: NDArray[np.int64], seq_lens: NDArray[np.int64], group: int, kv_heads: int, page: int, window: int | None
) -> NDArray[np.int32]:
    """The items of rows with so many queries each, the longest first: how many there are, then the fields of each.

    A tile's keys are split where the programs would otherwise end at very different times. There are at most as many
    items as `room_for` says.
    """
    tiles = cut_tiles(counts, seq_lens, group, page, window)
    fields = split_tiles(tiles, choose_limit(tiles, kv_heads, PART_UNITS // kv_heads, KEYS, num_programs()), KEYS)
    fields = fields[np.argsort(fields[:, 2] - fields[:, 3], kind="stable")]
    return np.concatenate(([len(fields)], fields.ravel())).astype(np.int32)


def cut_tiles(
    counts: NDArray[np.int64], seq_lens: NDArray[np.int64], group: int, page: int, window: int | None
) -> NDArray[np.int64]:
    """[tiles, 4]: row, first packed row, first key, end of keys"""
    each = -(-counts * group // TILE)
    row = np.repeat(np.arange(len(counts)), each)
    first = (np.arange(len(row)) - np.repeat(np.cumsum(each) - each, each)) * TILE
    context = (seq_lens - counts)[row]
    end = context + np.minimum((first + TILE - 1) // group, counts[row] - 1) + 1
    begin = np.zeros_like(end)
    if window is not None:
        begin = np.maximum(context + first // group - window + 1, 0) // page * page
    return np.stack((row, first, begin, end), axis=1).reshape(-1, 4)


def split_tiles(tiles: NDArray[np.int64], limit: int, keys: int) -> NDArray[np.int64]:
    """[items, ITEM_FIELDS]: tiles of more keys than the limit are split evenly; only those have slots."""
    length = tiles[:, 3] - tiles[:, 2]
    own = even_parts(length, limit, keys)
    count = np.maximum(-(-length // own), 1)
    nth = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    slots = np.where(count > 1, count, 0)
    fields = np.zeros((len(nth), ITEM_FIELDS), dtype=np.int64)
    fields[:, :4] = np.repeat(tiles, count, axis=0)
    fields[:, 2] += nth * np.repeat(own, count)
    fields[:, 3] = np.minimum(fields[:, 3], fields[:, 2] + np.repeat(own, count))
    fields[:, 4] = nth
    fields[:, 5] = np.repeat(count, count)
    fields[:, 6] = np.repeat(np.cumsum(slots) - slots, count)
    return fields


def even_parts(length: NDArray[np.int64], limit: int, keys: int) -> NDArray[np.int64]:
    """How many keys each part of a tile has: whole tiles of keys, as even as they get."""
    count = np.maximum(np.minimum(-(-length // limit), length // LEAST_KEYS), 1)
    tiles = -(-length // keys)
    return -(-tiles // count) * keys


def choose_limit(tiles: NDArray[np.int64], kv_heads: int, most: int, keys: int, programs: int) -> int:
    """The most keys of a part, such that the programs end as soon as possible. `most`: parts there is room for."""
    length = tiles[:, 3] - tiles[:, 2]
    longest = max(int(length.max(initial=0)), 1)
    best, soonest = longest, last_end(length, kv_heads, keys, programs)
    if soonest * programs <= 1.1 * float((length + keys).sum()) * kv_heads:
        return longest
    for parts in (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32):
        limit = -(-longest // parts)
        if limit < LEAST_KEYS:
            break
        own = even_parts(length, limit, keys)
        count = np.maximum(-(-length // own), 1)
        if int(count[count > 1].sum()) > most:
            break
        cost = np.where(count > 1, own + (1 + count // 2) * keys, length)  # parts are also left and joined
        end = last_end(np.repeat(cost, count), kv_heads, keys, programs)
        if end < 0.97 * soonest:
            best, soonest = limit, end
    return best


def last_end(length: NDArray[np.int64], kv_heads: int, keys: int, programs: int) -> float:
    """When the last program is done, in keys, if each unit costs a tile beside its own: as `take_unit` deals them."""
    costs = np.repeat(np.sort(length)[::-1] + keys, kv_heads)
    rounds = -(-len(costs) // programs)
    padded = np.zeros(max(rounds, 1) * programs)
    padded[: len(costs)] = costs
    dealt = padded.reshape(-1, programs)
    dealt[1::2] = dealt[1::2, ::-1].copy()
    return float(dealt.sum(axis=0).max())
