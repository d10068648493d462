"""Attention of rows with many queries: tiles of queries over the paged context, each with one query head.

`Tiles` says which queries make a tile; it is worked out once a step. A row's own tokens see what lies before them, or
what their tree's mask says. Where tiles are few and contexts long, as in a chat that goes on, several programs share a
tile's context, and the one that ends last puts their parts together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cuda.attention.scoring import Scoring
from quire.kernels.cuda.attention.softmax import load_tile, update_softmax
from quire.kernels.cuda.attention.split_kv import merge_partials, store_partial, workspace
from quire.kernels.cuda.launch.pdl import launch_dependents, pdl_options, wait_for_previous
from quire.kernels.paging import LayerCache, Paging

TILE_QUERIES = 128
PROGRAMS = 132  # as many as run at once on an H200; a context is split among no more
LEAST_KEYS = 512  # of a part


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of queries: how many, then the row of each and its first query in the row. There may be room for more."""

    numbers: Tensor  # [1 + 2 * room] int32

    @property
    def room(self) -> int:
        return self.numbers.shape[0] // 2

    @staticmethod
    def flatten(tiles: Sequence[tuple[int, int]]) -> list[int]:
        return [len(tiles), *(number for tile in tiles for number in tile)]


@triton.jit
def _prefill(
    q, keys, values, out, parts, tops, arrived, tables, seq_lens, starts, tiles, slopes, mask, scale, cap, window,
    q_row, out_row, table_row, block_stride, head_stride, mask_row, heads, programs,
    DIM: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, QUERIES: tl.constexpr,
    TILE: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_MASK: tl.constexpr, LEAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    wait_for_previous(PDL)
    num_tiles = tl.load(tiles)
    num_pairs = num_tiles * heads
    most_splits = tl.maximum(programs // tl.maximum(num_pairs, 1), 1)
    pair = tl.program_id(0) // most_splits
    split = tl.program_id(0) % most_splits
    if pair >= num_pairs:
        return
    tile = num_tiles - 1 - pair % num_tiles  # the long ones first
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
    if HAS_MASK:
        depth = tl.zeros([QUERIES], tl.int32)
        for other in range(count):
            depth += tl.load(mask + tokens * mask_row + other, mask=is_query, other=0).to(tl.int32)
        at = context + depth - 1
        end = seq_len
    else:
        at = context + lanes
        end = tl.minimum(seq_len, context + first_query + QUERIES)
    lowest = 0  # what lies before it may be gone from the block table
    if HAS_WINDOW:
        lowest = tl.maximum(context + (0 if HAS_MASK else first_query) - window + 1, 0)
    slope = tl.load(slopes + head) if HAS_SLOPES else 0.0
    table = tables + row.to(tl.int64) * table_row
    head_at = (head // GROUP).to(tl.int64) * head_stride
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, WIDTH], tl.float32)
    within = tl.arange(0, TILE)

    begin = lowest // TILE * TILE
    common = begin  # up to here every query sees every key
    if not HAS_WINDOW:
        common = (context + (0 if HAS_MASK else first_query + 1)) // TILE * TILE
    splits = tl.minimum(most_splits, tl.maximum((end - begin) // LEAST, 1))
    if split >= splits:
        return
    own = tl.cdiv(tl.cdiv(end - begin, TILE), splits) * TILE
    begin += split * own
    end = tl.minimum(end, begin + own)
    for key_at in range(begin, tl.minimum(common, end), TILE):
        places = key_at + within
        key, value = load_tile(
            keys, values, table, places, places, columns, block_stride, head_at, DIM, WIDTH, PAGE, False
        )
        distance = places[None, :] - at[:, None]
        top, mass, total = update_softmax(
            query, key, value, distance, distance, top, mass, total, scale, cap, slope, False, HAS_CAP, HAS_SLOPES
        )
    ahead: tl.constexpr = 2 if HAS_WINDOW else 1  # tiles are few here without a window
    for key_at in tl.range(tl.maximum(common, begin), end, TILE, num_stages=ahead):
        places = key_at + within
        there = (places < end) & (places >= lowest)
        key, value = load_tile(
            keys, values, table, places, there, columns, block_stride, head_at, DIM, WIDTH, PAGE, True
        )
        keys_at = places
        seen = there[None, :] & is_query[:, None]
        if HAS_MASK:
            nth = places - context
            is_own = (nth >= 0) & there
            visible = tl.load(
                mask + tokens[:, None] * mask_row + nth[None, :], mask=is_own[None, :] & is_query[:, None], other=0
            )
            seen &= (nth < 0)[None, :] | (visible != 0)
            if HAS_SLOPES or HAS_WINDOW:
                key_depth = tl.zeros([TILE], tl.int32)
                for other in range(count):
                    key_depth += tl.load(mask + (start + nth).to(tl.int64) * mask_row + other, mask=is_own, other=0).to(
                        tl.int32
                    )
                keys_at = tl.where(nth < 0, places, context + key_depth - 1)
        else:
            seen &= places[None, :] <= at[:, None]
        if HAS_WINDOW:
            seen &= keys_at[None, :] > at[:, None] - window
        distance = keys_at[None, :] - at[:, None]
        top, mass, total = update_softmax(
            query, key, value, seen, distance, top, mass, total, scale, cap, slope, True, HAS_CAP, HAS_SLOPES
        )
    is_last = splits == 1
    if splits > 1:
        in_tile = tl.arange(0, QUERIES)
        is_last = store_partial(
            parts, tops, arrived, pair * most_splits + split, pair, splits, top, mass, total, in_tile, columns,
            is_query, inside, QUERIES, WIDTH,
        )  # fmt: skip
        if is_last:
            first_part = pair * most_splits * QUERIES + in_tile
            mass, total = merge_partials(
                parts, tops, first_part, QUERIES, splits, columns, is_query, inside, QUERIES, WIDTH, 1
            )
    if is_last:
        result = total / tl.where(mass > 0.0, mass, 1.0)[:, None]
        to = out + tokens[:, None] * out_row + head * DIM + columns[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=inside)


def key_tile(dim: int, dtype: torch.dtype) -> int:
    """How many keys a program takes at a time: those of wide heads need more room each."""
    return 32 if dim > 128 or dtype == torch.float32 else 128


def prefill_attention(
    q: Tensor, cache: LayerCache, paging: Paging, tiles: Tiles, out: Tensor, scoring: Scoring, *, exact: bool = False
) -> None:
    """The queries of the tiles; others' places in `out` are left alone."""
    kv_heads, page, dim = cache.k.shape[1:]
    tables, mask = paging.block_tables[cache.group], paging.ancestors
    scale, window, slopes, softcap = scoring
    nothing = paging.seq_lens
    width, heads = triton.next_power_of_2(dim), q.shape[1]
    _prefill[(max(tiles.room * heads, PROGRAMS),)](
        q, cache.k, cache.v, out, *workspace("prefill", PROGRAMS, TILE_QUERIES, width, q.device), tables,
        paging.seq_lens, paging.query_starts, tiles.numbers, slopes if slopes is not None else nothing,
        mask.view(torch.uint8) if mask is not None else nothing, scale, softcap or 0.0, window or 0, q.stride(0),
        out.stride(0), tables.stride(0), cache.k.stride(0), cache.k.stride(1),
        mask.stride(0) if mask is not None else 0, heads, 0 if exact else PROGRAMS, DIM=dim, WIDTH=width,
        GROUP=heads // kv_heads, PAGE=page, QUERIES=TILE_QUERIES, TILE=key_tile(dim, q.dtype),
        HAS_SLOPES=slopes is not None, HAS_CAP=softcap is not None, HAS_WINDOW=window is not None,
        HAS_MASK=mask is not None, LEAST=LEAST_KEYS, num_warps=8, num_stages=2, enable_fp_fusion=not exact,
        **pdl_options(),
    )  # fmt: skip
