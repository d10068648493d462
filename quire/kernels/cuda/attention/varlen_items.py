"""The work list of `varlen.py`: items. An item is a tile of queries and a range of its keys.

The host computes the items of each step with numpy. `suits` is here and not in `varlen.py`, because importing that
needs a Triton with Gluon.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from quire.kernels.paging import LayerCache

H200_PROGRAMS = 132
MAX_PARTIALS = 2 * H200_PROGRAMS  # of the workspace: one a split and key head
MIN_SPLIT_KEYS = 512
TILE = 128  # packed rows
KEYS = 128  # of a tile
STAGES = {64: 4, 128: 2}  # by the heads' dimension: tiles of keys, and of values, in shared memory
PAGES = (16, 32, 64, 128)  # tokens in a block of the cache
ITEM_FIELDS = 7  # row, first packed row, first key, end of keys, split, number of splits, first partial


def suits(dtype: torch.dtype, cache: LayerCache, *, is_plain: bool) -> bool:
    """Whether `varlen.py` supports these: on Hopper, in half precision, with plain scores (`Scoring.is_plain`)."""
    page, dim = cache.k.shape[2:]
    is_half = dtype in (torch.bfloat16, torch.float16) and cache.k.dtype == dtype
    return is_half and is_plain and dim in STAGES and page in PAGES and is_hopper()


@cache
def is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@cache
def num_programs() -> int:
    """The number of multiprocessors. Each runs one program."""
    if not torch.cuda.is_available():
        return H200_PROGRAMS
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def max_items(num_tokens: int, num_rows: int, group: int, kv_heads: int) -> int:
    """An upper bound for the items of a step of `num_tokens` tokens in `num_rows` rows."""
    return num_tokens * group // TILE + num_rows + MAX_PARTIALS // kv_heads


def plan_items(
    counts: NDArray[np.int64], seq_lens: NDArray[np.int64], group: int, kv_heads: int, page: int, window: int | None
) -> NDArray[np.int32]:
    """The items of rows with counts[row] queries, the longest first: their number, then the fields of each.

    A tile's keys are split if the programs would otherwise end at very different times. There are at most `max_items`
    items.
    """
    tiles = cut_tiles(counts, seq_lens, group, page, window)
    fields = split_tiles(tiles, choose_limit(tiles, kv_heads, MAX_PARTIALS // kv_heads, KEYS, num_programs()), KEYS)
    fields = fields[np.argsort(fields[:, 2] - fields[:, 3], kind="stable")]
    return np.concatenate(([len(fields)], fields.ravel())).astype(np.int32)


def cut_tiles(
    counts: NDArray[np.int64], seq_lens: NDArray[np.int64], group: int, page: int, window: int | None
) -> NDArray[np.int64]:
    """[tiles, 4]: row, first packed row, first key, end of keys"""
    num_tiles = -(-counts * group // TILE)
    row = np.repeat(np.arange(len(counts)), num_tiles)
    first = (np.arange(len(row)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * TILE
    context = (seq_lens - counts)[row]
    end = context + np.minimum((first + TILE - 1) // group, counts[row] - 1) + 1
    begin = np.zeros_like(end)
    if window is not None:
        begin = np.maximum(context + first // group - window + 1, 0) // page * page
    return np.stack((row, first, begin, end), axis=1).reshape(-1, 4)


def split_tiles(tiles: NDArray[np.int64], limit: int, keys: int) -> NDArray[np.int64]:
    """[items, ITEM_FIELDS]: tiles of more keys than the limit are split evenly. Only those have partials."""
    length = tiles[:, 3] - tiles[:, 2]
    split_len = split_lengths(length, limit, keys)
    count = np.maximum(-(-length // split_len), 1)
    nth = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    partials = np.where(count > 1, count, 0)
    fields = np.zeros((len(nth), ITEM_FIELDS), dtype=np.int64)
    fields[:, :4] = np.repeat(tiles, count, axis=0)
    fields[:, 2] += nth * np.repeat(split_len, count)
    fields[:, 3] = np.minimum(fields[:, 3], fields[:, 2] + np.repeat(split_len, count))
    fields[:, 4] = nth
    fields[:, 5] = np.repeat(count, count)
    fields[:, 6] = np.repeat(np.cumsum(partials) - partials, count)
    return fields


def split_lengths(length: NDArray[np.int64], limit: int, keys: int) -> NDArray[np.int64]:
    """Keys of a split, for each tile: whole tiles of keys, as even as possible."""
    count = np.maximum(np.minimum(-(-length // limit), length // MIN_SPLIT_KEYS), 1)
    tiles = -(-length // keys)
    return -(-tiles // count) * keys


def choose_limit(tiles: NDArray[np.int64], kv_heads: int, max_splits: int, keys: int, programs: int) -> int:
    """The maximum number of keys of a split: the one with which the last program ends first, of a few candidates."""
    length = tiles[:, 3] - tiles[:, 2]
    longest = max(int(length.max(initial=0)), 1)
    best, earliest = longest, last_end(length, kv_heads, keys, programs)
    if earliest * programs <= 1.1 * float((length + keys).sum()) * kv_heads:
        return longest
    for splits in (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32):
        limit = -(-longest // splits)
        if limit < MIN_SPLIT_KEYS:
            break
        split_len = split_lengths(length, limit, keys)
        count = np.maximum(-(-length // split_len), 1)
        if int(count[count > 1].sum()) > max_splits:
            break
        cost = np.where(count > 1, split_len + (1 + count // 2) * keys, length)  # with store and merge of partials
        end = last_end(np.repeat(cost, count), kv_heads, keys, programs)
        if end < 0.97 * earliest:
            best, earliest = limit, end
    return best


def last_end(length: NDArray[np.int64], kv_heads: int, keys: int, programs: int) -> float:
    """When the last program ends, in keys. A unit costs its keys and one tile more; `take_unit` assigns units."""
    costs = np.repeat(np.sort(length)[::-1] + keys, kv_heads)
    rounds = -(-len(costs) // programs)
    padded = np.zeros(max(rounds, 1) * programs)
    padded[: len(costs)] = costs
    assigned = padded.reshape(-1, programs)
    assigned[1::2] = assigned[1::2, ::-1].copy()
    return float(assigned.sum(axis=0).max())
