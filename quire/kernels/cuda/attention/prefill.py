"""Prefill attention: rows with several queries. A tile of queries, with one query head, attends to the paged context.

`Tiles` lists the tiles; it is made once a step. A row's own tokens see the tokens before them. `verify.py` computes
trees of drafts. With few tiles and long contexts, as in a later turn of a chat, several programs share a tile's
context, and the last one to end merges their partial results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cuda.attention.scoring import Scoring
from quire.kernels.cuda.attention.softmax import add_sinks, load_tile, update_softmax
from quire.kernels.cuda.attention.split_kv import merge_partials, store_partial, workspace
from quire.kernels.cuda.launch.pdl import launch_dependents, pdl_options, wait_for_previous
from quire.kernels.paging import LayerCache, Paging

TILE_QUERIES = 128
PROGRAMS = 132  # that run at once on an H200: the maximum number of splits
MIN_SPLIT_KEYS = 512


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of queries: their number, then the row and the first query of each. The tensor may be longer."""

    numbers: Tensor  # [1 + 2 * capacity] int32

    @property
    def capacity(self) -> int:
        return self.numbers.shape[0] // 2

    @staticmethod
    def flatten(tiles: Sequence[tuple[int, int]]) -> list[int]:
        return [len(tiles), *(number for tile in tiles for number in tile)]


@triton.jit
def _prefill(
    q, keys, values, out, partials, tops, arrived, tables, seq_lens, starts, tiles, slopes, sinks, scale, cap, window,
    q_row, out_row, table_row, block_stride, head_stride, heads, programs,
    DIM: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, QUERIES: tl.constexpr,
    TILE: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, MIN_SPLIT_KEYS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    wait_for_previous(PDL)
    num_tiles = tl.load(tiles)
    num_pairs = num_tiles * heads
    max_splits = tl.maximum(programs // tl.maximum(num_pairs, 1), 1)
    pair = tl.program_id(0) // max_splits
    split = tl.program_id(0) % max_splits
    if pair >= num_pairs:
        return
    tile = num_tiles - 1 - pair % num_tiles  # the longest first
    head = pair // num_tiles
    row = tl.load(tiles + 1 + 2 * tile)
    first_query = tl.load(tiles + 2 + 2 * tile)
    start = tl.load(starts + row)
    count = tl.load(starts + row + 1) - start
    seq_len = tl.load(seq_lens + row)
    context = seq_len - count

    lanes = first_query + tl.arange(0, QUERIES)
    columns = tl.arange(0, WIDTH)
    is_query = lanes < count
    is_column = columns < DIM
    inside = is_query[:, None] & is_column[None, :]
    tokens = (start + lanes).to(tl.int64)
    query = tl.load(q + tokens[:, None] * q_row + head * DIM + columns[None, :], mask=inside, other=0.0)
    query_positions = context + lanes
    end = tl.minimum(seq_len, context + first_query + QUERIES)
    lowest = 0  # block table entries before it may be freed blocks
    if HAS_WINDOW:
        lowest = tl.maximum(context + first_query - window + 1, 0)
    slope = tl.load(slopes + head) if HAS_SLOPES else 0.0
    table = tables + row.to(tl.int64) * table_row
    head_offset = (head // GROUP).to(tl.int64) * head_stride
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, WIDTH], tl.float32)
    within = tl.arange(0, TILE)

    begin = lowest // TILE * TILE
    common = begin  # every query sees every key before this
    if not HAS_WINDOW:
        common = (context + first_query + 1) // TILE * TILE
    splits = tl.minimum(max_splits, tl.maximum((end - begin) // MIN_SPLIT_KEYS, 1))
    if split >= splits:
        return
    split_len = tl.cdiv(tl.cdiv(end - begin, TILE), splits) * TILE
    begin += split * split_len
    end = tl.minimum(end, begin + split_len)
    for tile_start in range(begin, tl.minimum(common, end), TILE):
        tile_positions = tile_start + within
        key, value = load_tile(
            keys, values, table, tile_positions, tile_positions, columns, block_stride, head_offset, DIM, WIDTH, PAGE,
            False,
        )  # fmt: skip
        distance = tile_positions[None, :] - query_positions[:, None]
        top, mass, total = update_softmax(
            query, key, value, distance, distance, top, mass, total, scale, cap, slope, False, HAS_CAP, HAS_SLOPES
        )
    stages: tl.constexpr = 2 if HAS_WINDOW else 1  # without a window this loop has few tiles
    for tile_start in tl.range(tl.maximum(common, begin), end, TILE, num_stages=stages):
        tile_positions = tile_start + within
        in_range = (tile_positions < end) & (tile_positions >= lowest)
        key, value = load_tile(
            keys, values, table, tile_positions, in_range, columns, block_stride, head_offset, DIM, WIDTH, PAGE, True
        )
        is_visible = in_range[None, :] & is_query[:, None]
        is_visible &= tile_positions[None, :] <= query_positions[:, None]
        if HAS_WINDOW:
            is_visible &= tile_positions[None, :] > query_positions[:, None] - window
        distance = tile_positions[None, :] - query_positions[:, None]
        top, mass, total = update_softmax(
            query, key, value, is_visible, distance, top, mass, total, scale, cap, slope, True, HAS_CAP, HAS_SLOPES
        )
    is_last = splits == 1
    if splits > 1:
        in_tile = tl.arange(0, QUERIES)
        is_last = store_partial(
            partials, tops, arrived, pair * max_splits + split, pair, splits, top, mass, total, in_tile, columns,
            is_query, inside, QUERIES, WIDTH,
        )  # fmt: skip
        if is_last:
            first_index = pair * max_splits * QUERIES + in_tile
            top, mass, total = merge_partials(
                partials, tops, first_index, QUERIES, splits, columns, is_query, inside, QUERIES, WIDTH, 1
            )
    if is_last:
        mass = add_sinks(mass, top, sinks, head, True, HAS_SINKS)
        result = total / tl.where(mass > 0.0, mass, 1.0)[:, None]
        out_ptrs = out + tokens[:, None] * out_row + head * DIM + columns[None, :]
        tl.store(out_ptrs, result.to(out.dtype.element_ty), mask=inside)


def key_tile(dim: int, dtype: torch.dtype) -> int:
    """Keys of a tile. Keys of wide heads need more shared memory."""
    return 32 if dim > 128 or dtype == torch.float32 else 128


def prefill_attention(
    q: Tensor, cache: LayerCache, paging: Paging, tiles: Tiles, out: Tensor, scoring: Scoring, *, exact: bool = False
) -> None:
    """Attention of the queries of the tiles. The rows of other queries in `out` are not written."""
    kv_heads, page, dim = cache.k.shape[1:]
    tables = paging.block_tables[cache.group]
    scale, window, slopes, softcap, sinks = scoring
    unused = paging.seq_lens
    width, heads = triton.next_power_of_2(dim), q.shape[1]
    _prefill[(max(tiles.capacity * heads, PROGRAMS),)](
        q, cache.k, cache.v, out, *workspace("prefill", PROGRAMS, TILE_QUERIES, width, q.device), tables,
        paging.seq_lens, paging.query_starts, tiles.numbers, slopes if slopes is not None else unused,
        sinks if sinks is not None else unused, scale, softcap or 0.0, window or 0, q.stride(0),
        out.stride(0), tables.stride(0), cache.k.stride(0), cache.k.stride(1),
        heads, 0 if exact else PROGRAMS, DIM=dim, WIDTH=width,
        GROUP=heads // kv_heads, PAGE=page, QUERIES=TILE_QUERIES, TILE=key_tile(dim, q.dtype),
        HAS_SLOPES=slopes is not None, HAS_SINKS=sinks is not None, HAS_CAP=softcap is not None,
        HAS_WINDOW=window is not None, MIN_SPLIT_KEYS=MIN_SPLIT_KEYS, num_warps=8, num_stages=2,
        enable_fp_fusion=not exact,
        **pdl_options(),
    )  # fmt: skip
