"""Attention of single queries that `decode.py` does not support: many query heads a key head, float32, and exact
engines. A program computes one split of a row's context for one key head.

In an exact engine a query gets the same bits as in a tile of `prefill.py`. So contexts are not split, and tiles of keys
have the same size and the same first positions. With `Paging.paths` each token is an entry of its own, and its context
and path are read as if they were one sequence. So a node of a tree gets the bits of the same path as a chain.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cuda.attention.scoring import Scoring
from quire.kernels.cuda.attention.softmax import add_sinks, load_tile, update_softmax
from quire.kernels.cuda.attention.split_kv import FIELDS, max_partials, merge_partials, store_partial, workspace
from quire.kernels.cuda.launch.pdl import launch_dependents, pdl_options, wait_for_previous, wait_for_previous_once
from quire.kernels.paging import LayerCache, Paging

EXACT_QUERIES = 64  # with this many rows the matrix instructions are those of a tile of queries
MIN_QUERIES = 16  # the fewest rows of a matrix instruction


@triton.jit
def _single(
    q, keys, values, out, partials, tops, arrived, tables, splits, slopes, sinks, starts, seq_lens, paths, scale, cap,
    window, q_row, out_row, table_row, block_stride, head_stride, path_row, num_depths,
    DIM: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    QUERIES: tl.constexpr, FIELDS: tl.constexpr, KV_HEADS: tl.constexpr, HAS_PATHS: tl.constexpr,
    DEPTHS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    split = splits + tl.program_id(0) // KV_HEADS * FIELDS  # padding entries, with a negative row, come last
    head = tl.program_id(0) % KV_HEADS
    row = tl.load(split)
    if row < 0:
        wait_for_previous_once(PDL)
        return
    wait_for_previous(PDL)
    begin, end, count = tl.load(split + 1) // TILE * TILE, tl.load(split + 2), tl.load(split + 5)
    seq_len, token = tl.load(split + 6), tl.load(split + 7).to(tl.int64)
    context = seq_len - 1
    path = paths + token * path_row
    is_node = False
    if HAS_PATHS:
        row_start = tl.load(starts + row)
        context = tl.load(seq_lens + row) - tl.load(starts + row + 1) + row_start
        depths = tl.arange(0, DEPTHS)
        length = tl.sum((tl.load(path + depths, mask=depths < num_depths, other=-1) >= 0).to(tl.int32), axis=0)
        is_node = length > 0
        end = context + (length if is_node else token.to(tl.int32) - row_start + 1)
        seq_len = end
        begin = 0
    first = tl.maximum(seq_len - window, 0) if HAS_WINDOW else 0
    if HAS_PATHS and HAS_WINDOW:
        begin = first // TILE * TILE
    lanes = tl.arange(0, QUERIES)
    columns = tl.arange(0, WIDTH)
    is_query = lanes < GROUP
    heads = head * GROUP + lanes
    inside = is_query[:, None] & (columns < DIM)[None, :]
    head_offsets = heads[:, None] * DIM + columns[None, :]
    query = tl.load(q + token * q_row + head_offsets, mask=inside, other=0.0)
    table = tables + row.to(tl.int64) * table_row
    head_offset = head.to(tl.int64) * head_stride
    slope = tl.zeros([QUERIES, 1], tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slopes + heads, mask=is_query, other=0.0)[:, None]
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, WIDTH], tl.float32)
    for start in range(begin, end, TILE):
        positions = start + tl.arange(0, TILE)
        visible = (positions < end) & (positions >= first)
        places = positions
        if HAS_PATHS:
            is_own = is_node & visible & (positions >= context)
            places = tl.where(is_own, context + tl.load(path + positions - context, mask=is_own, other=0), positions)
        key, value = load_tile(
            keys, values, table, places, visible, columns, block_stride, head_offset, DIM, WIDTH, PAGE, True
        )
        distance = (positions - seq_len + 1)[None, :]
        top, mass, total = update_softmax(
            query, key, value, visible[None, :], distance, top, mass, total, scale, cap, slope, True, HAS_CAP,
            HAS_SLOPES,
        )  # fmt: skip
    is_last = count == 1
    if count > 1:
        partial, first_partial = tl.load(split + 3) * KV_HEADS + head, tl.load(split + 4) * KV_HEADS + head
        is_last = store_partial(
            partials, tops, arrived, partial, first_partial, count, top, mass, total, lanes, columns, is_query, inside,
            QUERIES, WIDTH,
        )  # fmt: skip
        if is_last:
            first_index = first_partial * QUERIES + lanes
            top, mass, total = merge_partials(
                partials, tops, first_index, KV_HEADS * QUERIES, count, columns, is_query, inside, QUERIES, WIDTH, 1
            )
    if is_last:
        mass = add_sinks(mass, top, sinks, heads, is_query, HAS_SINKS)
        result = total / tl.where(mass > 0.0, mass, 1.0)[:, None]
        tl.store(out + token * out_row + head_offsets, result.to(out.dtype.element_ty), mask=inside)


def single_query_attention(
    q: Tensor,
    cache: LayerCache,
    paging: Paging,
    splits: Tensor,
    out: Tensor,
    scoring: Scoring,
    exact_tile: int | None = None,
) -> None:
    """As `decode_attention`. With `exact_tile`, exact, in tiles of that many keys; then `splits` must split no row, and
    with `paging.paths` an entry is one token of a row, and its range of keys is not used."""
    kv_heads, page, dim = cache.k.shape[1:]
    group, width = q.shape[1] // kv_heads, triton.next_power_of_2(dim)
    queries = max(MIN_QUERIES if exact_tile is None else EXACT_QUERIES, triton.next_power_of_2(group))
    partials, tops, arrived = workspace("single", max_partials(kv_heads) * kv_heads, queries, width, q.device)
    scale, window, slopes, softcap, sinks = scoring
    tables, unused = paging.block_tables[cache.group], splits
    is_short = exact_tile is not None or q.dtype == torch.float32
    paths = paging.paths if exact_tile is not None else None
    num_depths = 1 if paths is None else paths.shape[1]
    assert q.stride(2) == 1
    assert q.stride(1) == dim
    _single[(splits.shape[0] * kv_heads,)](
        q, cache.k, cache.v, out, partials, tops, arrived, tables, splits, slopes if slopes is not None else unused,
        sinks if sinks is not None else unused, paging.query_starts, paging.seq_lens,
        unused if paths is None else paths, scale, softcap or 0.0, window or 0, q.stride(0), out.stride(0),
        tables.stride(0), cache.k.stride(0), cache.k.stride(1),
        0 if paths is None else paths.stride(0), num_depths, DIM=dim, WIDTH=width, GROUP=group, PAGE=page,
        TILE=exact_tile or 64, HAS_SLOPES=slopes is not None, HAS_SINKS=sinks is not None, HAS_CAP=softcap is not None,
        HAS_WINDOW=window is not None, QUERIES=queries, FIELDS=FIELDS, KV_HEADS=kv_heads, HAS_PATHS=paths is not None,
        DEPTHS=triton.next_power_of_2(num_depths), num_warps=4, num_stages=2 if is_short else 3,
        enable_fp_fusion=exact_tile is None, **pdl_options(),
    )  # fmt: skip
