"""Attention of rows of a few queries: a request's last token and the drafts after it. Rows of one query may be among
them. A program computes one split of a row's context for one key head and up to LANES lanes.

A lane is a query with one query head of the key head's group: lane l is query l // GROUP with head l % GROUP. Up to
MAX_COLUMNS lanes are the columns of both products, as in `decode.py`; more are their rows, as in `prefill.py`. A row's
keys are read once for all its lanes, but if the step has few tokens: then several programs of few lanes share a row.
They read the keys from the GPU's cache, and merge splits at the same time.

The queries of a tree see the context and their ancestors. `path_masks` gives the ancestors of each token as bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cuda.attention.scoring import Scoring
from quire.kernels.cuda.attention.softmax import (
    add_sinks,
    load_tile,
    load_transposed,
    update_softmax,
    update_transposed,
)
from quire.kernels.cuda.attention.split_kv import (
    FIELDS,
    PROGRAMS,
    max_partials,
    merge_partials,
    store_partial,
    workspace,
)
from quire.kernels.cuda.launch.pdl import launch_dependents, pdl_options, wait_for_previous, wait_for_previous_once
from quire.kernels.paging import LayerCache, Paging

QUERIES = (2, 4, 8, 16)  # of a row: kernels are compiled for these
MAX_QUERIES = QUERIES[-1]
MAX_NODES = 64  # tokens of a row in a step with trees: the bits of a mask
MIN_LANES, MAX_COLUMNS, MAX_LANES = 8, 16, 64  # of a program
FEW_TOKENS = 32  # of a step: up to this, programs have MIN_LANES
MANY_TOKENS = 192  # of a step: from this on, most rows of up to MAX_COLUMNS lanes are not split


@triton.jit
def _path_masks(paths, masks, num_tokens, depths, row_stride, TOKENS: tl.constexpr, PDL: tl.constexpr):
    launch_dependents(PDL)
    wait_for_previous(PDL)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    mask = tl.zeros([TOKENS], tl.int64)
    one = tl.full([TOKENS], 1, tl.int64)
    for depth in range(depths):
        node = tl.load(paths + tokens.to(tl.int64) * row_stride + depth, mask=is_token, other=-1)
        mask |= tl.where(node >= 0, one << tl.maximum(node, 0).to(tl.int64), 0)
    tl.store(masks + tokens, mask, mask=is_token)


def path_masks(paths: Tensor) -> Tensor:
    """paths [tokens, max_depth + 1] int32, as in `Paging` -> [tokens] int64: bit i is set if the row's token i is an
    ancestor of this token, or this token. A token of a chain has no bit."""
    num_tokens, depths = paths.shape
    masks = torch.empty(num_tokens, dtype=torch.int64, device=paths.device)
    _path_masks[(triton.cdiv(num_tokens, 64),)](
        paths, masks, num_tokens, depths, paths.stride(0), TOKENS=64, num_warps=2, **pdl_options()
    )
    return masks


@triton.jit
def _depth(mask):
    """How many of a token's ancestors are in its row: the bits of its mask, without its own."""
    bits = mask - ((mask >> 1) & 0x5555555555555555)
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
    bits += bits >> 8
    bits += bits >> 16
    bits += bits >> 32
    return (bits & 0x7F).to(tl.int32) - 1


@triton.jit
def _load_mask(masks, token, nth, exists):
    """Masks of a row's tokens `nth`. In a chain, token n has the first n + 1 bits."""
    mask = tl.load(masks + token, mask=exists, other=0)
    of_chain = (tl.full(nth.shape, 2, tl.int64) << tl.minimum(nth, 63).to(tl.int64)) - 1
    return tl.where(mask == 0, of_chain, mask)


@triton.jit
def _attend(
    first, last, query, mask, query_positions, top, masses, total, context, end, start, keys, values, masks, table,
    columns, scale, cap, window, slope, block_stride, head_offset,
    DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_TREE: tl.constexpr, IS_LARGE: tl.constexpr,
    ARE_ROWS: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Add the tiles that begin at first, first + TILE, ... before last. Without IS_MASKED all queries see all keys.
    With ARE_ROWS lanes are the rows of the products."""
    within = tl.arange(0, TILE)
    for tile_start in range(first, last, TILE):
        positions = tile_start + within
        lowest = tl.maximum(context - window + 1, 0) if HAS_WINDOW else 0  # before it there may be freed blocks
        in_range = (positions < end) & (positions >= lowest)
        nth = positions - context
        key_positions = positions
        if IS_MASKED and IS_TREE and (HAS_SLOPES or HAS_WINDOW):
            is_own = (nth >= 0) & (positions < end)
            own_mask = _load_mask(masks, start + nth, tl.maximum(nth, 0), is_own)
            key_positions = tl.where(is_own, context + _depth(own_mask), positions)
        if ARE_ROWS:
            key, value = load_tile(
                keys, values, table, positions, in_range, columns, block_stride, head_offset, DIM, WIDTH, PAGE,
                IS_MASKED,
            )  # fmt: skip
            in_range, nth, key_positions = in_range[None, :], nth[None, :], key_positions[None, :]
            lane_mask, lane_positions = mask[:, None], query_positions[:, None]
        else:
            key, value = load_transposed(
                keys, values, table, positions, in_range, columns, block_stride, head_offset, DIM, WIDTH, PAGE,
                IS_LARGE, IS_MASKED,
            )  # fmt: skip
            in_range, nth, key_positions = in_range[:, None], nth[:, None], key_positions[:, None]
            lane_mask, lane_positions = mask[None, :], query_positions[None, :]
        distance = key_positions - lane_positions
        visible = in_range
        if IS_MASKED:
            if IS_TREE:
                is_ancestor = (lane_mask >> tl.minimum(tl.maximum(nth, 0), 63).to(tl.int64)) & 1
                visible = visible & ((nth < 0) | (is_ancestor != 0))
            else:
                visible = visible & (distance <= 0)
            if HAS_WINDOW:
                visible = visible & (distance > -window)
        if ARE_ROWS:
            top, masses, total = update_softmax(
                query, key, value, visible, distance, top, masses, total, scale, cap, slope, IS_MASKED, HAS_CAP,
                HAS_SLOPES,
            )  # fmt: skip
        else:
            top, masses, total = update_transposed(
                query, key, value, visible, distance, top, masses, total, scale, cap, slope, IS_MASKED, HAS_CAP,
                HAS_SLOPES,
            )  # fmt: skip
    return top, masses, total


@triton.jit(do_not_specialize=["parts"])
def _verify(
    q, keys, values, out, partials, tops, arrived, tables, starts, splits, masks, slopes, sinks, scale, cap, window,
    parts, q_row, out_row, table_row, block_stride, head_stride,
    DIM: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    IS_TREE: tl.constexpr, LANES: tl.constexpr, ARE_ROWS: tl.constexpr, FIELDS: tl.constexpr, KV_HEADS: tl.constexpr,
    IS_LARGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    units = KV_HEADS * parts
    split = splits + tl.program_id(0) // units * FIELDS  # padding entries, with a negative row, come last
    unit = tl.program_id(0) % units
    head, part = unit // parts, unit % parts
    row = tl.load(split)
    if row < 0:
        wait_for_previous_once(PDL)
        return
    begin, end, num_splits = tl.load(split + 1), tl.load(split + 2), tl.load(split + 5)
    seq_len, start = tl.load(split + 6), tl.load(split + 7)
    count = tl.load(starts + row + 1) - start
    if part * LANES >= count * GROUP:
        return
    context = seq_len - count

    within = tl.arange(0, LANES)
    lanes = part * LANES + within
    queries = lanes // GROUP
    columns = tl.arange(0, WIDTH)
    is_lane = queries < count
    is_column = columns < DIM
    heads = head * GROUP + lanes % GROUP
    tokens = (start + queries).to(tl.int64)
    table = tables + row.to(tl.int64) * table_row
    head_offset = head * head_stride
    slope = 0.0
    if HAS_SLOPES:
        slope = tl.load(slopes + heads, mask=is_lane, other=0.0)
        slope = slope[:, None] if ARE_ROWS else slope[None, :]
    wait_for_previous(PDL)
    mask = tl.zeros([LANES], tl.int64)
    depths = queries
    if IS_TREE:
        mask = _load_mask(masks, tokens, queries, is_lane)
        if HAS_SLOPES or HAS_WINDOW:
            depths = _depth(mask)
    query_positions = context + depths
    inside = is_lane[:, None] & is_column[None, :]
    head_ptrs = q + tokens * q_row + heads * DIM
    if ARE_ROWS:
        query = tl.load(head_ptrs[:, None] + columns[None, :], mask=inside, other=0.0)
        masses = tl.zeros([LANES], tl.float32)
        total = tl.zeros([LANES, WIDTH], tl.float32)
    else:
        query = tl.load(head_ptrs[None, :] + columns[:, None], mask=is_column[:, None] & is_lane[None, :], other=0.0)
        masses = tl.zeros([TILE, LANES], tl.float32)
        total = tl.zeros([WIDTH, LANES], tl.float32)
    top = tl.full([LANES], float("-inf"), tl.float32)
    opening = begin  # tiles before this hide keys from some queries, because of the window
    if HAS_WINDOW:
        begin = tl.maximum(begin, tl.maximum(context - window + 1, 0) // TILE * TILE)
        opening = begin + tl.cdiv(tl.maximum(tl.minimum(seq_len - window, end) - begin, 0), TILE) * TILE
        top, masses, total = _attend(
            begin, opening, query, mask, query_positions, top, masses, total, context, end, start, keys, values, masks,
            table, columns, scale, cap, window, slope, block_stride, head_offset, DIM, WIDTH, PAGE, TILE, HAS_SLOPES,
            HAS_CAP, HAS_WINDOW, IS_TREE, IS_LARGE, ARE_ROWS, True,
        )  # fmt: skip
    # All queries see the context and the first token of their row.
    whole = begin + tl.maximum(tl.minimum(end, context + 1) - begin, 0) // TILE * TILE
    top, masses, total = _attend(
        opening, whole, query, mask, query_positions, top, masses, total, context, end, start, keys, values, masks,
        table, columns, scale, cap, window, slope, block_stride, head_offset, DIM, WIDTH, PAGE, TILE, HAS_SLOPES,
        HAS_CAP, HAS_WINDOW, IS_TREE, IS_LARGE, ARE_ROWS, False,
    )  # fmt: skip
    top, masses, total = _attend(
        tl.maximum(opening, whole), end, query, mask, query_positions, top, masses, total, context, end, start, keys,
        values, masks, table, columns, scale, cap, window, slope, block_stride, head_offset, DIM, WIDTH, PAGE, TILE,
        HAS_SLOPES, HAS_CAP, HAS_WINDOW, IS_TREE, IS_LARGE, ARE_ROWS, True,
    )  # fmt: skip
    mass = masses
    if not ARE_ROWS:
        mass, total = tl.sum(masses, axis=0), tl.trans(total)

    is_last = num_splits == 1
    if num_splits > 1:
        partial, first_partial = tl.load(split + 3) * units + unit, tl.load(split + 4) * units + unit
        is_last = store_partial(
            partials, tops, arrived, partial, first_partial, num_splits, top, mass, total, within, columns, is_lane,
            inside, LANES, WIDTH,
        )  # fmt: skip
        if is_last:
            top, mass, total = merge_partials(
                partials, tops, first_partial * LANES + within, units * LANES, num_splits, columns, is_lane, inside,
                LANES, WIDTH, 2 if ARE_ROWS else 4,
            )  # fmt: skip
    if is_last:
        mass = add_sinks(mass, top, sinks, heads, is_lane, HAS_SINKS)
        result = total / tl.where(mass > 0.0, mass, 1.0)[:, None]
        out_ptrs = out + tokens[:, None] * out_row + heads[:, None] * DIM + columns[None, :]
        tl.store(out_ptrs, result.to(out.dtype.element_ty), mask=inside)


class Shape(NamedTuple):
    """Keys of a tile, and the launch options."""

    tile: int
    warps: int
    stages: int


def choose_shape(lanes: int, dim: int, dtype: torch.dtype) -> Shape:
    """Measured on an H200, at 1 to 64 rows. Wide heads and float32 need more shared memory."""
    if dtype == torch.float32:
        return Shape(32, 4, 2)
    return Shape(32 if dim > 128 else 64, 4 if lanes > 32 or dim > 128 else 2, 3)


def round_queries(num_queries: int) -> int:
    """The maximum number of queries of a kernel for rows of up to `num_queries`."""
    return next(queries for queries in (1, *QUERIES, 32, MAX_NODES) if queries >= num_queries)


def split_lanes(max_queries: int, group: int, num_tokens: int) -> tuple[int, int]:
    """Lanes of a program, and how many programs share a row's lanes. It depends on the size of the step, with padding,
    so that a captured graph has a fixed grid."""
    num_lanes = max_queries * group
    lanes = min(max(MIN_LANES, triton.next_power_of_2(num_lanes)), MIN_LANES if num_tokens <= FEW_TOKENS else MAX_LANES)
    return lanes, triton.cdiv(num_lanes, lanes)


def num_units(max_queries: int, group: int, kv_heads: int, num_tokens: int) -> int:
    """Programs of a split: `split_contexts` takes them as its number of key heads."""
    return kv_heads * split_lanes(max_queries, group, num_tokens)[1]


def is_fastest(max_queries: int, group: int, num_tokens: int) -> bool:
    """Whether this is faster than `varlen`, where that supports the step: measured with `benchmarks/verify.py`."""
    num_lanes = max_queries * group
    is_few = num_tokens <= FEW_TOKENS // 2 or num_lanes <= MIN_LANES
    return is_few or (num_lanes <= MAX_COLUMNS and num_tokens >= MANY_TOKENS)


def verify_attention(
    q: Tensor,
    cache: LayerCache,
    paging: Paging,
    splits: Tensor,
    out: Tensor,
    scoring: Scoring,
    max_queries: int,
    masks: Tensor | None = None,
    shape: Shape | None = None,
) -> None:
    """Attention of the rows in `splits` [n, FIELDS], of at most `max_queries` queries each, which lists the work of
    `num_units` programs each. With trees, `masks` are the tokens' `path_masks`."""
    kv_heads, page, dim = cache.k.shape[1:]
    group, width = q.shape[1] // kv_heads, triton.next_power_of_2(dim)
    lanes, parts = split_lanes(max_queries, group, q.shape[0])
    tile, warps, stages = shape or choose_shape(lanes, dim, q.dtype)
    units = kv_heads * parts
    num_partials = max(2 * PROGRAMS, max_partials(units) * units)  # the same for most numbers of queries
    partials, tops, arrived = workspace("verify", num_partials, lanes, width, q.device)
    scale, window, slopes, softcap, sinks = scoring
    tables, unused = paging.block_tables[cache.group], splits
    assert q.stride(2) == 1
    assert q.stride(1) == dim
    _verify[(splits.shape[0] * units,)](
        q, cache.k, cache.v, out, partials, tops, arrived, tables, paging.query_starts, splits,
        unused if masks is None else masks, unused if slopes is None else slopes,
        unused if sinks is None else sinks, scale, softcap or 0.0, window or 0,
        parts, q.stride(0), out.stride(0), tables.stride(0), cache.k.stride(0), cache.k.stride(1), DIM=dim, WIDTH=width,
        GROUP=group, PAGE=page, TILE=tile, HAS_SLOPES=slopes is not None, HAS_SINKS=sinks is not None,
        HAS_CAP=softcap is not None, HAS_WINDOW=window is not None, IS_TREE=masks is not None, LANES=lanes,
        ARE_ROWS=lanes > MAX_COLUMNS,
        FIELDS=FIELDS, KV_HEADS=kv_heads, IS_LARGE=cache.k.shape[0] * cache.k.stride(0) >= 2**31, num_warps=warps,
        num_stages=stages, **pdl_options(),
    )  # fmt: skip
