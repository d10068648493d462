"""Attention to latents (MLA): one key head for all query heads, whose values are the first numbers of its keys.

Each latent is read once, for both products. Keys are the rows of the first product, and the transposed latents those of
the second; the columns, called lanes, are the query heads of one query or of a few. A program computes the lanes of one
entry: a split of a row's context (`split_kv.py`), or a few queries of a tile of `prefill.Tiles` over their whole
context. In an exact engine contexts are not split, and a program always has the lanes of QUERIES queries, so that a
token gets the same bits alone and in a prompt. A node of a tree is an entry of its own there, and reads its path as if
it were a sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cuda.attention.prefill import TILE_QUERIES, Tiles
from quire.kernels.cuda.attention.softmax import LOG2_E
from quire.kernels.cuda.attention.split_kv import FIELDS, max_partials, merge_partials, store_partial, workspace
from quire.kernels.cuda.attention.varlen_items import is_hopper
from quire.kernels.cuda.launch.pdl import launch_dependents, pdl_options, wait_for_previous, wait_for_previous_once
from quire.kernels.paging import LayerCache, Paging

MAX_HEADS = 64  # of a program
MAX_LANES = 64
UNITS = 4  # a split is as much work as four of one key head of 128 numbers; with 2, 64 rows of 4,096 take 9% longer


@triton.jit
def _load_latents(
    keys, table, places, columns, rotated, block_stride, RANK: tl.constexpr, ROTATED: tl.constexpr,
    IS_FULL: tl.constexpr, PAGE: tl.constexpr, IS_LARGE: tl.constexpr,
):  # fmt: skip
    """A tile's latents [places, columns], and what is rotated [places, rotated]. IS_FULL: both widths are powers of
    two."""
    block = tl.load(table + places // PAGE)
    if IS_LARGE:
        block = block.to(tl.int64)
    offset = (block * block_stride + places % PAGE * (RANK + ROTATED))[:, None]
    latent_ptrs, end_ptrs = keys + (offset + columns[None, :]), keys + (offset + RANK + rotated[None, :])
    if IS_FULL:
        return tl.load(latent_ptrs), tl.load(end_ptrs)
    latent = tl.load(latent_ptrs, mask=(columns < RANK)[None, :], other=0.0)
    return latent, tl.load(end_ptrs, mask=(rotated < ROTATED)[None, :], other=0.0)


@triton.jit
def _update(query, query_end, latent, end, visible, top, mass, total, scale):
    """Add a tile: query [dim, lanes], total [rank, lanes], mass [lanes]."""
    latent, end = latent.to(query.dtype), end.to(query.dtype)
    scores = tl.dot(latent, query, input_precision="ieee")
    scores = tl.dot(end, query_end, scores, input_precision="ieee") * (scale * LOG2_E)
    scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, axis=0))
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - safe[None, :])
    rescale = tl.exp2(top - safe)
    mass = mass * rescale + tl.sum(weights, axis=0)
    total = tl.dot(tl.trans(latent), weights.to(latent.dtype), total * rescale[None, :], input_precision="ieee")
    return higher, mass, total


@triton.jit
def _latent(
    q, keys, out, partials, tops, arrived, tables, splits, tiles, starts, seq_lens, masks, paths, scale, q_row, out_row,
    table_row, block_stride, path_row, num_depths, num_heads,
    RANK: tl.constexpr, ROTATED: tl.constexpr, WIDTH: tl.constexpr, ROTATED_WIDTH: tl.constexpr, HEADS: tl.constexpr,
    QUERIES: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, HAS_TILES: tl.constexpr, HAS_MASKS: tl.constexpr,
    HAS_PATHS: tl.constexpr, DEPTHS: tl.constexpr, ONE_QUERY: tl.constexpr, FIELDS: tl.constexpr, GROUPS: tl.constexpr,
    IS_LARGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    LANES: tl.constexpr = QUERIES * HEADS
    entry, group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS
    head_groups = tl.cdiv(num_heads, HEADS)
    first_query = group // head_groups * QUERIES
    begin, end, count, partial, first_partial = 0, 0, 1, 0, 0
    if HAS_TILES:
        wait_for_previous(PDL)
        num_tiles = tl.load(tiles)
        if entry >= num_tiles:
            return
        tile = num_tiles - 1 - entry  # the longest first
        row = tl.load(tiles + 1 + 2 * tile)
        first_query += tl.load(tiles + 2 + 2 * tile)
    else:
        split = splits + entry * FIELDS  # padding entries, with a negative row, come last
        row = tl.load(split)
        if row < 0:
            wait_for_previous_once(PDL)
            return
        wait_for_previous(PDL)
        begin, end, count = tl.load(split + 1), tl.load(split + 2), tl.load(split + 5)
        partial, first_partial = tl.load(split + 3) * GROUPS + group, tl.load(split + 4) * GROUPS + group
    if ONE_QUERY:
        token, num_queries, seq_len = tl.load(split + 7), 1, tl.load(split + 6)
    else:
        token = tl.load(starts + row)
        num_queries, seq_len = tl.load(starts + row + 1) - token, tl.load(seq_lens + row)
    if first_query >= num_queries:
        return
    before = seq_len - 1  # keys before the path
    path, is_node = paths, False
    if HAS_PATHS:
        path += token.to(tl.int64) * path_row
        row_start = tl.load(starts + row)
        before = tl.load(seq_lens + row) - tl.load(starts + row + 1) + row_start
        depths = tl.arange(0, DEPTHS)
        length = tl.sum((tl.load(path + depths, mask=depths < num_depths, other=-1) >= 0).to(tl.int32), axis=0)
        is_node = length > 0
        seq_len = before + tl.where(is_node, length, token - row_start + 1)
        end = seq_len
    context = seq_len - num_queries
    if HAS_TILES:
        end = tl.minimum(seq_len, context + first_query + QUERIES)

    lanes, columns, rotated = tl.arange(0, LANES), tl.arange(0, WIDTH), tl.arange(0, ROTATED_WIDTH)
    queries, heads = first_query + lanes // HEADS, group % head_groups * HEADS + lanes % HEADS
    is_query = (queries < num_queries) & (heads < num_heads)
    tokens = (token + queries).to(tl.int64)
    query_ptrs = q + (tokens * q_row + heads * (RANK + ROTATED))[None, :]
    query = tl.load(query_ptrs + columns[:, None], mask=is_query[None, :] & (columns < RANK)[:, None], other=0.0)
    query_end = tl.load(
        query_ptrs + RANK + rotated[:, None], mask=is_query[None, :] & (rotated < ROTATED)[:, None], other=0.0
    )
    if HAS_MASKS:
        seen = tl.load(masks + tokens, mask=is_query, other=0)
    table = tables + row.to(tl.int64) * table_row
    is_full: tl.constexpr = RANK == WIDTH and ROTATED == ROTATED_WIDTH
    top = tl.full([LANES], float("-inf"), tl.float32)
    mass = tl.zeros([LANES], tl.float32)
    total = tl.zeros([WIDTH, LANES], tl.float32)
    within = tl.arange(0, TILE)
    for start in range(begin, end, TILE):
        positions = start + within
        places = tl.minimum(positions, end - 1)  # of the last tile: what is behind the end is not visible
        if HAS_PATHS:
            is_own = is_node & (places >= before)
            places = tl.where(is_own, before + tl.load(path + places - before, mask=is_own, other=0), places)
        latent, ends = _load_latents(
            keys, table, places, columns, rotated, block_stride, RANK, ROTATED, is_full, PAGE, IS_LARGE
        )
        visible = (positions < end)[:, None] & (positions[:, None] <= context + queries[None, :])
        if HAS_MASKS:
            node = positions[:, None] - context
            is_ancestor = ((seen[None, :] >> tl.minimum(tl.maximum(node, 0), 63)) & 1) == 1
            visible &= (node < 0) | (seen == 0)[None, :] | is_ancestor
        top, mass, total = _update(query, query_end, latent, ends, visible, top, mass, total, scale)

    total = tl.trans(total)
    inside = is_query[:, None] & (columns < RANK)[None, :]
    out_ptrs = out + (tokens * out_row + heads * RANK)[:, None] + columns[None, :]
    is_last = count == 1
    if count > 1:
        is_last = store_partial(
            partials, tops, arrived, partial, first_partial, count, top, mass, total, lanes, columns, is_query, inside,
            LANES, WIDTH,
        )  # fmt: skip
        if is_last:
            top, mass, total = merge_partials(
                partials, tops, first_partial * LANES + lanes, GROUPS * LANES, count, columns, is_query, inside, LANES,
                WIDTH, 2 if LANES <= 16 else 1,
            )  # fmt: skip
    if is_last:
        result = total / tl.where(mass > 0.0, mass, 1.0)[:, None]
        tl.store(out_ptrs, result.to(out.dtype.element_ty), mask=inside)


class Shape(NamedTuple):
    """Keys of a tile, and the launch options."""

    tile: int
    warps: int
    stages: int


class Lanes(NamedTuple):
    """How the queries and heads of an entry are dealt to programs."""

    heads: int  # of a program
    queries: int  # of a program
    groups: int  # programs of an entry


def deal_lanes(heads: int, max_queries: int, *, exact: bool) -> Lanes:
    own_heads = min(MAX_HEADS, max(16, triton.next_power_of_2(heads)))
    queries = 1 if max_queries == 1 and not exact else max(1, MAX_LANES // own_heads)
    return Lanes(own_heads, queries, triton.cdiv(heads, own_heads) * triton.cdiv(max_queries, queries))


def num_units(heads: int, max_queries: int, *, exact: bool) -> int:
    """Programs of a split, as `split_contexts` counts them."""
    return UNITS * deal_lanes(heads, max_queries, exact=exact).groups


def choose_shape(lanes: int, dtype: torch.dtype) -> Shape:
    """Measured on an H200. Other GPUs have less shared memory."""
    if dtype == torch.float32:
        return Shape(16, 4, 2)
    return Shape(64 if is_hopper() else 32, 4 if lanes <= 16 else 8, 2)


def latent_attention(
    q: Tensor,
    cache: LayerCache,
    paging: Paging,
    out: Tensor,
    scale: float,
    *,
    splits: Tensor | None = None,
    tiles: Tiles | None = None,
    max_queries: int = 1,
    masks: Tensor | None = None,
    paths: Tensor | None = None,
    exact: bool = False,
    shape: Shape | None = None,
) -> None:
    """q [tokens, heads, rank + rotated] -> out [tokens, heads, rank], of the rows in `splits`, of up to `max_queries`
    queries, or of the tiles. The other rows of `out` are not written. With `paths`, of an exact engine, an entry of
    `splits` is one token of a row, and its range of keys is not used."""
    _, heads, dim = q.shape
    rank, page = out.shape[2], cache.k.shape[2]
    max_queries = TILE_QUERIES if splits is None else max_queries
    lanes = deal_lanes(heads, max_queries, exact=exact)
    shape = shape or choose_shape(lanes.queries * lanes.heads, q.dtype)
    width = triton.next_power_of_2(rank)
    units = 1 if splits is None else num_units(heads, max_queries, exact=exact)
    num_partials = 1 if splits is None else max_partials(units) * lanes.groups
    user = f"latent {max_queries}"
    buffers = workspace(user, num_partials, lanes.queries * lanes.heads, width, q.device)
    assert (splits is None) != (tiles is None)
    entries = splits.shape[0] if splits is not None else tiles.capacity if tiles is not None else 0
    num_depths = 1 if paths is None else paths.shape[1]
    tables, unused = paging.block_tables[cache.group], paging.seq_lens
    assert q.stride(2) == 1
    assert q.stride(1) == dim
    assert out.is_contiguous()
    assert cache.k.stride(2) == dim
    _latent[(entries * lanes.groups,)](
        q, cache.k, out, *buffers, tables, unused if splits is None else splits,
        unused if tiles is None else tiles.numbers, paging.query_starts, paging.seq_lens,
        unused if masks is None else masks, unused if paths is None else paths, scale, q.stride(0), out.stride(0),
        tables.stride(0), cache.k.stride(0), 0 if paths is None else paths.stride(0), num_depths, heads, RANK=rank,
        ROTATED=dim - rank, WIDTH=width, ROTATED_WIDTH=triton.next_power_of_2(dim - rank),
        HEADS=lanes.heads, QUERIES=lanes.queries, PAGE=page, TILE=shape.tile, HAS_TILES=tiles is not None,
        HAS_MASKS=masks is not None, HAS_PATHS=paths is not None, DEPTHS=triton.next_power_of_2(num_depths),
        ONE_QUERY=splits is not None and max_queries == 1, FIELDS=FIELDS, GROUPS=lanes.groups,
        IS_LARGE=cache.k.shape[0] * cache.k.stride(0) >= 2**31, num_warps=shape.warps, num_stages=shape.stages,
        enable_fp_fusion=not exact, **pdl_options(),
    )  # fmt: skip
