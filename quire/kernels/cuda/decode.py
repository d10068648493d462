"""Attention of rows with one query each: a program takes a stretch of one row's context for one key head.

All query heads of a key head share a tile, so each key is read once. Where a row's context is split, the program that
ends last puts the parts together, in their order: the sum does not depend on who was last.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cuda.chain import after_last, chained, let_next
from quire.kernels.cuda.scoring import Scoring, soften
from quire.kernels.paging import LayerCache

MIN_QUERIES = 16  # the least a tensor core takes
PROGRAMS = 132 * 4  # enough to keep an H200's multiprocessors reading
MAX_SPLITS = 32


@triton.jit
def _decode(
    q, keys, values, out, parts, tops, arrived, tables, seq_lens, rows, starts, slopes, scale, cap, window, q_row,
    out_row, table_row, block_stride, head_stride,
    DIM: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    SPLITS: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_ROWS: tl.constexpr, QUERIES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    let_next(CHAINED)
    after_last(CHAINED)
    entry = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(rows + entry) if HAS_ROWS else entry
    if row < 0:
        return
    token = (tl.load(starts + row) if HAS_ROWS else row).to(tl.int64)
    seq_len = tl.load(seq_lens + row)
    first = tl.maximum(seq_len - window, 0) if HAS_WINDOW else 0
    tiles = tl.cdiv(seq_len, TILE) - first // TILE
    own = tl.cdiv(tiles, SPLITS)
    begin = (first // TILE + split * own) * TILE
    end = tl.minimum(begin + own * TILE, seq_len)

    lanes = tl.arange(0, QUERIES)
    columns = tl.arange(0, WIDTH)
    is_query = lanes < GROUP
    is_column = columns < DIM
    heads = head * GROUP + lanes
    inside = is_query[:, None] & is_column[None, :]
    query = tl.load(q + token * q_row + heads[:, None] * DIM + columns[None, :], mask=inside, other=0.0)
    slope = tl.zeros([QUERIES], tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slopes + heads, mask=is_query, other=0.0)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, WIDTH], tl.float32)
    within = tl.arange(0, TILE)
    for at in range(begin, end, TILE):
        places = at + within
        seen = (places < end) & (places >= first)
        block = tl.load(tables + row.to(tl.int64) * table_row + places // PAGE, mask=seen, other=0).to(tl.int64)
        offset = block * block_stride + head * head_stride + places % PAGE * DIM
        wanted = seen[:, None] & is_column[None, :]
        key = tl.load(keys + offset[:, None] + columns[None, :], mask=wanted, other=0.0).to(query.dtype)
        value = tl.load(values + offset[:, None] + columns[None, :], mask=wanted, other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if HAS_CAP:
            scores = soften(scores, cap)
        if HAS_SLOPES:
            scores += slope[:, None] * (places - (seq_len - 1))[None, :].to(tl.float32)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        fading = tl.exp(top - higher)
        mass = mass * fading + tl.sum(weights, axis=1)
        total = total * fading[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        top = higher

    to = out + token * out_row + heads[:, None] * DIM + columns[None, :]
    if SPLITS == 1:
        result = total / tl.where(mass > 0.0, mass, 1.0)[:, None]
        tl.store(to, result.to(out.dtype.element_ty), mask=inside)
    else:
        pair = (entry * tl.num_programs(1) + head).to(tl.int64)
        mine = (pair * SPLITS + split) * QUERIES + lanes
        tl.store(parts + mine[:, None] * WIDTH + columns[None, :], total, mask=inside)
        tl.store(tops + mine * 2, top, mask=is_query)
        tl.store(tops + mine * 2 + 1, mass, mask=is_query)
        tl.debug_barrier()
        before = tl.atomic_add(arrived + pair, 1, sem="acq_rel")
        if before == SPLITS - 1:
            top = tl.full([QUERIES], float("-inf"), tl.float32)
            mass = tl.zeros([QUERIES], tl.float32)
            total = tl.zeros([QUERIES, WIDTH], tl.float32)
            for other in range(SPLITS):
                its = (pair * SPLITS + other) * QUERIES + lanes
                its_top = tl.load(tops + its * 2, mask=is_query, other=0.0, cache_modifier=".cg")
                its_mass = tl.load(tops + its * 2 + 1, mask=is_query, other=0.0, cache_modifier=".cg")
                higher = tl.maximum(top, its_top)
                safe = tl.where(higher == float("-inf"), 0.0, higher)
                fading = tl.exp(top - safe)
                factor = tl.exp(its_top - safe)
                mass = mass * fading + its_mass * factor
                from_it = parts + its[:, None] * WIDTH + columns[None, :]
                part = tl.load(from_it, mask=inside, other=0.0, cache_modifier=".cg")
                total = total * fading[:, None] + part * factor[:, None]
                top = higher
            result = total / tl.where(mass > 0.0, mass, 1.0)[:, None]
            tl.store(to, result.to(out.dtype.element_ty), mask=inside)
            tl.store(arrived + pair, 0)


@cache
def workspace(queries: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the parts of split rows, shared by all layers and steps. It never grows or moves: graphs point to it."""
    lanes = PROGRAMS * queries
    parts = torch.empty(lanes * width, dtype=torch.float32, device=device)
    tops = torch.empty(lanes * 2, dtype=torch.float32, device=device)
    return parts, tops, torch.zeros(PROGRAMS, dtype=torch.int32, device=device)


def choose_splits(num_rows: int, kv_heads: int) -> int:
    """How many programs share a row's context: fixed for a number of rows, since a captured graph cannot change it.

    Where there are several, they are PROGRAMS or fewer in all: the workspace has room for no more.
    """
    return max(1, min(MAX_SPLITS, PROGRAMS // max(1, num_rows * kv_heads)))


def decode_attention(
    q: Tensor,
    cache: LayerCache,
    tables: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    scoring: Scoring,
    rows: Tensor | None = None,
    starts: Tensor | None = None,
) -> None:
    """Rows of one query: all of them, their tokens in order, or those in `rows`, whose tokens are at starts[row]."""
    kv_heads, page, dim = cache.k.shape[1:]
    count = seq_lens.shape[0] if rows is None else rows.shape[0]
    splits, group = choose_splits(count, kv_heads), q.shape[1] // kv_heads
    queries, width = max(MIN_QUERIES, triton.next_power_of_2(group)), triton.next_power_of_2(dim)
    parts, tops, arrived = workspace(queries, width, q.device)
    scale, window, slopes, softcap = scoring
    nothing = seq_lens
    _decode[(count, kv_heads, splits)](
        q, cache.k, cache.v, out, parts, tops, arrived, tables, seq_lens, nothing if rows is None else rows,
        nothing if starts is None else starts, slopes if slopes is not None else nothing, scale, softcap or 0.0,
        window or 0, q.stride(0), out.stride(0), tables.stride(0), cache.k.stride(0), cache.k.stride(1),
        DIM=dim, WIDTH=width, GROUP=group, PAGE=page, TILE=64, SPLITS=splits, HAS_SLOPES=slopes is not None,
        HAS_CAP=softcap is not None, HAS_WINDOW=window is not None, HAS_ROWS=rows is not None, QUERIES=queries,
        num_warps=4, num_stages=3 if q.dtype != torch.float32 else 2, **chained(),
    )  # fmt: skip
