"""Attention of many rows with one query each: a program takes the whole context of one row for one key head.

Keys and values are the rows of both products here, and the few queries of a key head are the columns: `decode`, with
queries as rows, must fill sixteen of them. So many rows bring a GPU to its power limit, where work that is left out
counts even if memory is what everything waits for.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cuda.chain import after_last, chained, let_next
from quire.kernels.cuda.scoring import Scoring
from quire.kernels.cuda.softmax import score
from quire.kernels.paging import LayerCache

MAX_GROUP = 8  # query heads of a key head; with more, queries fill the rows of `decode`
TILE = 64
QUERIES = 8  # columns; sixteen would be multiplied by other instructions, which ptxas gets wrong after a loop


@triton.jit
def _take_in(
    query, key, value, seen, distance, top, mass, total, scale, cap, slope, IS_MASKED: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
):  # fmt: skip
    """As `absorb`, the other way round: query and total [dim, queries], mass [keys, queries] and not summed yet."""
    key, value = key.to(query.dtype), value.to(query.dtype)
    scores = score(tl.dot(key, query), distance, scale, cap, slope, HAS_CAP, HAS_SLOPES)
    if IS_MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, axis=0))
    safe = tl.where(higher == float("-inf"), 0.0, higher) if IS_MASKED else higher
    weights = tl.exp2(scores - safe[None, :])
    fading = tl.exp2(top - safe)[None, :]
    total = tl.dot(value, weights.to(value.dtype), total * fading)
    return higher, mass * fading + weights, total


@triton.jit
def _read(
    keys, values, table, places, seen, columns, block_stride, head_at, DIM: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """A tile's keys [places, columns] and values [columns, places]; zeros where nothing is seen."""
    if IS_MASKED:
        block = tl.load(table + places // PAGE, mask=seen, other=0).to(tl.int64)
    else:
        block = tl.load(table + places // PAGE).to(tl.int64)
    at = block * block_stride + head_at + places % PAGE * DIM
    at_keys, at_values = at[:, None] + columns[None, :], at[None, :] + columns[:, None]
    if IS_MASKED:
        key = tl.load(keys + at_keys, mask=seen[:, None] & (columns < DIM)[None, :], other=0.0)
        value = tl.load(values + at_values, mask=seen[None, :] & (columns < DIM)[:, None], other=0.0)
    elif DIM < WIDTH:
        key = tl.load(keys + at_keys, mask=(columns < DIM)[None, :], other=0.0)
        value = tl.load(values + at_values, mask=(columns < DIM)[:, None], other=0.0)
    else:
        key, value = tl.load(keys + at_keys), tl.load(values + at_values)
    return key, value


@triton.jit
def _attend_many(
    q, keys, values, out, tables, seq_lens, rows, starts, slopes, scale, cap, window, q_row, out_row, table_row,
    block_stride, head_stride,
    DIM: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_ROWS: tl.constexpr,
    QUERIES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    let_next(CHAINED)
    head = tl.program_id(1)
    row = tl.load(rows + tl.program_id(0)) if HAS_ROWS else tl.program_id(0)
    after_last(CHAINED)
    if row < 0:
        return
    seq_len = tl.load(seq_lens + row)
    first = tl.maximum(seq_len - window, 0) if HAS_WINDOW else 0
    token = (tl.load(starts + row) if HAS_ROWS else row).to(tl.int64)
    table = tables + row.to(tl.int64) * table_row
    head_at = head.to(tl.int64) * head_stride
    lanes = tl.arange(0, QUERIES)
    columns = tl.arange(0, WIDTH)
    within = tl.arange(0, TILE)
    heads = head * GROUP + lanes
    is_query = lanes < GROUP
    inside = (columns < DIM)[:, None] & is_query[None, :]
    at_heads = heads[None, :] * DIM + columns[:, None]
    query = tl.load(q + token * q_row + at_heads, mask=inside, other=0.0)
    slope = tl.load(slopes + heads, mask=is_query, other=0.0)[None, :] if HAS_SLOPES else 0.0
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([TILE, QUERIES], tl.float32)
    total = tl.zeros([WIDTH, QUERIES], tl.float32)

    begin = first // TILE * TILE
    whole = begin if HAS_WINDOW else seq_len // TILE * TILE  # up to here tiles are seen whole
    for at in range(begin, whole, TILE):
        places = at + within
        key, value = _read(
            keys, values, table, places, places, columns, block_stride, head_at, DIM, WIDTH, PAGE, False
        )
        distance = (places - seq_len + 1)[:, None]
        top, mass, total = _take_in(
            query, key, value, distance, distance, top, mass, total, scale, cap, slope, False, HAS_CAP, HAS_SLOPES
        )
    ahead: tl.constexpr = 3 if HAS_WINDOW else 1  # else there is one tile at most
    for at in tl.range(whole, seq_len, TILE, num_stages=ahead):
        places = at + within
        seen = (places < seq_len) & (places >= first)
        key, value = _read(
            keys, values, table, places, seen, columns, block_stride, head_at, DIM, WIDTH, PAGE, True
        )
        distance = (places - seq_len + 1)[:, None]
        top, mass, total = _take_in(
            query, key, value, seen[:, None], distance, top, mass, total, scale, cap, slope, True, HAS_CAP, HAS_SLOPES
        )
    mass_of_all = tl.sum(mass, axis=0)
    result = total / tl.where(mass_of_all > 0.0, mass_of_all, 1.0)[None, :]
    tl.store(out + token * out_row + at_heads, result.to(out.dtype.element_ty), mask=inside)


def attend_many(
    q: Tensor,
    cache: LayerCache,
    tables: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    scoring: Scoring,
    rows: Tensor | None,
    starts: Tensor | None,
) -> None:
    """As `decode_attention`; contexts are not split."""
    kv_heads, page, dim = cache.k.shape[1:]
    count = seq_lens.shape[0] if rows is None else rows.shape[0]
    scale, window, slopes, softcap = scoring
    nothing = seq_lens
    assert q.stride(2) == 1
    assert q.stride(1) == dim
    _attend_many[(count, kv_heads)](
        q, cache.k, cache.v, out, tables, seq_lens, nothing if rows is None else rows,
        nothing if starts is None else starts, slopes if slopes is not None else nothing, scale, softcap or 0.0,
        window or 0, q.stride(0), out.stride(0), tables.stride(0), cache.k.stride(0), cache.k.stride(1),
        DIM=dim, WIDTH=triton.next_power_of_2(dim), GROUP=q.shape[1] // kv_heads, PAGE=page, TILE=TILE,
        HAS_SLOPES=slopes is not None, HAS_CAP=softcap is not None, HAS_WINDOW=window is not None,
        HAS_ROWS=rows is not None,
        QUERIES=QUERIES, num_warps=4, num_stages=3, **chained(),
    )  # fmt: skip
