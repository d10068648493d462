"""Decode attention: rows with one query each. A program computes one split of a row's context for one key head.

Keys and values are the rows of both products, and the query heads of a key head are the columns. A matrix instruction
has at least 8 columns but 16 rows, so this pads queries less. With more than 8 query heads a key head,
`single_query.py` is used.

With `New`, the kernel also rotates and writes to the cache: each program rotates its queries, and the program whose
split ends with the new token rotates the new key and stores key and value. Cached keys, values and angles are loaded
before the projection kernel has ended.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cuda.attention.scoring import Scoring
from quire.kernels.cuda.attention.softmax import add_sinks, load_transposed, score, update_transposed
from quire.kernels.cuda.attention.split_kv import FIELDS, max_partials, merge_partials, store_partial, workspace
from quire.kernels.cuda.launch.pdl import launch_dependents, pdl_options, wait_for_previous, wait_for_previous_once
from quire.kernels.cuda.rope import fit
from quire.kernels.paging import LayerCache, Paging

QUERIES = 8  # columns of a matrix instruction: the maximum number of query heads a key head
NEW_ROWS = 64  # with more rows, `New` is slower than separate kernels


@triton.jit
def _partner(columns, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr):
    """For each column: its partner in the rotation, the index of their angle, and the sign of the partner's term."""
    if INTERLEAVED:
        return columns ^ 1, columns // 2, tl.where(columns % 2 == 0, -1.0, 1.0)
    half: tl.constexpr = ROTARY_DIM // 2
    is_first = columns < half
    return tl.where(is_first, columns + half, columns - half), columns % half, tl.where(is_first, -1.0, 1.0)


@triton.jit
def _load_angles(table, columns, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr):
    """From a row of the table, for each column: the cosine, and the sine with the sign of the partner's term."""
    _, angle, sign = _partner(columns, ROTARY_DIM, INTERLEAVED)
    is_rotary = columns < ROTARY_DIM
    cosines = tl.load(table + angle, mask=is_rotary, other=1.0)
    return cosines, tl.load(table + ROTARY_DIM // 2 + angle, mask=is_rotary, other=0.0) * sign


@triton.jit
def _rotated(x, columns, inside, cosines, sines, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr):
    """x points to heads [1, lanes]. Returns them rotated by these angles and rounded to their stored type."""
    partner, _, _ = _partner(columns, ROTARY_DIM, INTERLEAVED)
    own = tl.load(x + columns[:, None], mask=inside, other=0.0)
    other = tl.load(x + partner[:, None], mask=inside & (columns < ROTARY_DIM)[:, None], other=0.0)
    rotated = own.to(tl.float32) * cosines[:, None] + other.to(tl.float32) * sines[:, None]
    return rotated.to(own.dtype)


@triton.jit
def _update_with_new(query, key, value, has_newest, top, mass, total, scale, cap, HAS_CAP: tl.constexpr):
    """Add the newest token's key and value, [dim, 1] each, if this program's split has them; mass is already summed."""
    products = tl.sum(query.to(tl.float32) * key.to(query.dtype).to(tl.float32), axis=0)
    new_score = score(products, 0, scale, cap, 0.0, HAS_CAP, False)  # its distance to the query is 0
    new_score = tl.where(has_newest, new_score, float("-inf"))
    higher = tl.maximum(top, new_score)
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    weight, rescale = tl.exp2(new_score - safe), tl.exp2(top - safe)
    mass = mass * rescale + weight
    total = total * rescale[None, :] + weight[None, :] * value.to(query.dtype).to(tl.float32)
    return higher, mass, total


@triton.jit
def _decode(
    q, k, v, keys, values, out, partials, tops, arrived, tables, splits, slopes, sinks, angles, scale, cap, window,
    q_row, k_row, v_row, out_row, table_row, block_stride, head_stride,
    DIM: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    IS_NEW: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, QUERIES: tl.constexpr,
    FIELDS: tl.constexpr, KV_HEADS: tl.constexpr, IS_LARGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    split = splits + tl.program_id(0) // KV_HEADS * FIELDS  # padding entries, with a negative row, come last
    head = tl.program_id(0) % KV_HEADS
    row = tl.load(split)
    if row < 0:
        wait_for_previous_once(PDL)
        return
    begin, end, count = tl.load(split + 1), tl.load(split + 2), tl.load(split + 5)
    newest, token = tl.load(split + 6) - 1, tl.load(split + 7).to(tl.int64)
    first = tl.maximum(newest + 1 - window, 0) if HAS_WINDOW else 0
    if HAS_WINDOW:  # only the first tile is masked by it. A tile may be smaller than UNIT, where splits begin
        begin = tl.maximum(begin, first // TILE * TILE)
    has_newest = (begin <= newest) & (newest < end)
    stop = tl.minimum(end, newest) if IS_NEW else end

    lanes = tl.arange(0, QUERIES)
    columns = tl.arange(0, WIDTH)
    within = tl.arange(0, TILE)
    is_query = lanes < GROUP
    is_column = columns < DIM
    heads = head * GROUP + lanes
    table = tables + row.to(tl.int64) * table_row
    head_offset = head * head_stride
    slope = 0.0
    if HAS_SLOPES:
        slope = tl.load(slopes + heads, mask=is_query, other=0.0)[None, :]

    if not IS_NEW:
        wait_for_previous(PDL)
    is_first_apart: tl.constexpr = IS_NEW or HAS_WINDOW  # the first tile is computed before the loop
    positions = begin + within
    visible = (positions < stop) & (positions >= first)
    if is_first_apart:
        key, value = load_transposed(
            keys, values, table, positions, visible, columns, block_stride, head_offset, DIM, WIDTH, PAGE, IS_LARGE,
            True,
        )  # fmt: skip
    if IS_NEW:
        newest_block = tl.load(table + newest // PAGE, mask=has_newest, other=0).to(tl.int64)
        cosines, sines = _load_angles(angles + tl.maximum(newest, 0) * ROTARY_DIM, columns, ROTARY_DIM, INTERLEAVED)
        wait_for_previous(PDL)
    query_ptrs = q + token * q_row + heads[None, :] * DIM
    is_query_value = is_column[:, None] & is_query[None, :]
    if IS_NEW:
        one = tl.arange(0, 1)[None, :]
        new_mask = is_column[:, None] & has_newest
        new_key = _rotated(
            k + token * k_row + head * DIM + one, columns, new_mask, cosines, sines, ROTARY_DIM, INTERLEAVED
        )
        new_value = tl.load(v + token * v_row + head * DIM + one + columns[:, None], mask=new_mask, other=0.0)
        query = _rotated(query_ptrs, columns, is_query_value, cosines, sines, ROTARY_DIM, INTERLEAVED)
        new_key, new_value = fit(new_key, keys), fit(new_value, values)
        new_offset = newest_block * block_stride + head_offset + newest % PAGE * DIM + one + columns[:, None]
        tl.store(keys + new_offset, new_key, mask=new_mask)
        tl.store(values + new_offset, new_value, mask=new_mask)
    else:
        query = tl.load(query_ptrs + columns[:, None], mask=is_query_value, other=0.0)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    masses = tl.zeros([TILE, QUERIES], tl.float32)
    total = tl.zeros([WIDTH, QUERIES], tl.float32)
    if is_first_apart:
        top, masses, total = update_transposed(
            query, key, value, visible[:, None], (positions - newest)[:, None], top, masses, total, scale, cap, slope,
            True, HAS_CAP, HAS_SLOPES,
        )  # fmt: skip
    after_first = begin + TILE if is_first_apart else begin
    whole = tl.maximum(begin + (stop - begin) // TILE * TILE, after_first)  # tiles before this need no mask
    for start in range(after_first, whole, TILE):
        positions = start + within
        key, value = load_transposed(
            keys, values, table, positions, positions, columns, block_stride, head_offset, DIM, WIDTH, PAGE, IS_LARGE,
            False,
        )  # fmt: skip
        top, masses, total = update_transposed(
            query, key, value, positions, (positions - newest)[:, None], top, masses, total, scale, cap, slope, False,
            HAS_CAP, HAS_SLOPES,
        )  # fmt: skip
    if whole < stop:
        positions = whole + within
        visible = positions < stop
        key, value = load_transposed(
            keys, values, table, positions, visible, columns, block_stride, head_offset, DIM, WIDTH, PAGE, IS_LARGE,
            True,
        )  # fmt: skip
        top, masses, total = update_transposed(
            query, key, value, visible[:, None], (positions - newest)[:, None], top, masses, total, scale, cap, slope,
            True, HAS_CAP, HAS_SLOPES,
        )  # fmt: skip
    mass = tl.sum(masses, axis=0)
    if IS_NEW:
        top, mass, total = _update_with_new(
            query, new_key, new_value, has_newest, top, mass, total, scale, cap, HAS_CAP
        )

    total = tl.trans(total)
    inside = is_query[:, None] & is_column[None, :]
    out_ptrs = out + token * out_row + heads[:, None] * DIM + columns[None, :]
    if count == 1:
        mass = add_sinks(mass, top, sinks, heads, is_query, HAS_SINKS)
        result = total / tl.where(mass > 0.0, mass, 1.0)[:, None]
        tl.store(out_ptrs, result.to(out.dtype.element_ty), mask=inside)
    else:
        partial, first_partial = tl.load(split + 3) * KV_HEADS + head, tl.load(split + 4) * KV_HEADS + head
        is_last = store_partial(
            partials, tops, arrived, partial, first_partial, count, top, mass, total, lanes, columns, is_query, inside,
            QUERIES, WIDTH,
        )  # fmt: skip
        if is_last:
            first_index = first_partial * QUERIES + lanes
            top, mass, total = merge_partials(
                partials, tops, first_index, KV_HEADS * QUERIES, count, columns, is_query, inside, QUERIES, WIDTH, 4
            )
            mass = add_sinks(mass, top, sinks, heads, is_query, HAS_SINKS)
            result = total / tl.where(mass > 0.0, mass, 1.0)[:, None]
            tl.store(out_ptrs, result.to(out.dtype.element_ty), mask=inside)


class New(NamedTuple):
    """The new tokens' keys and values [rows, kv_heads, dim], before rotation, and the rotary table."""

    k: Tensor
    v: Tensor
    angles: Tensor
    interleaved: bool


class Shape(NamedTuple):
    """Keys of a tile, and the launch options."""

    tile: int
    warps: int
    stages: int


def choose_shape(dim: int) -> Shape:
    """Measured on an H200, at 1 to 256 rows. Wide heads need more shared memory."""
    return Shape(32, 2, 4) if dim > 128 else Shape(64, 2, 3)


def suits(q: Tensor, kv_heads: int) -> bool:
    return q.shape[1] <= QUERIES * kv_heads and q.dtype != torch.float32


def decode_attention(
    q: Tensor,
    cache: LayerCache,
    paging: Paging,
    splits: Tensor,
    out: Tensor,
    scoring: Scoring,
    new: New | None = None,
    shape: Shape | None = None,
) -> None:
    """Attention of the single-query rows in `splits` [n, FIELDS], which lists the work of each program."""
    kv_heads, page, dim = cache.k.shape[1:]
    tile, warps, stages = shape or choose_shape(dim)
    width = triton.next_power_of_2(dim)
    partials, tops, arrived = workspace("decode", max_partials(kv_heads) * kv_heads, QUERIES, width, q.device)
    scale, window, slopes, softcap, sinks = scoring
    tables, unused = paging.block_tables[cache.group], splits
    k, v, angles, interleaved = new or New(q, q, q, False)
    assert all(x.stride(2) == 1 and x.stride(1) == dim for x in (q, k, v))
    _decode[(splits.shape[0] * kv_heads,)](
        q, k, v, cache.k, cache.v, out, partials, tops, arrived, tables, splits,
        slopes if slopes is not None else unused, sinks if sinks is not None else unused, angles, scale,
        softcap or 0.0, window or 0, q.stride(0), k.stride(0), v.stride(0), out.stride(0), tables.stride(0),
        cache.k.stride(0), cache.k.stride(1), DIM=dim,
        WIDTH=width, GROUP=q.shape[1] // kv_heads, PAGE=page, TILE=tile, HAS_SLOPES=slopes is not None,
        HAS_SINKS=sinks is not None, HAS_CAP=softcap is not None, HAS_WINDOW=window is not None, IS_NEW=new is not None,
        ROTARY_DIM=0 if new is None else angles.shape[1], INTERLEAVED=interleaved, QUERIES=QUERIES, FIELDS=FIELDS,
        KV_HEADS=kv_heads, IS_LARGE=cache.k.shape[0] * cache.k.stride(0) >= 2**31, num_warps=warps, num_stages=stages,
        **pdl_options(),
    )  # fmt: skip
