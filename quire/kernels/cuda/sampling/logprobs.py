"""Log probabilities and ranks of chosen tokens, and the top log probabilities, from the head's products.

A row's results do not depend on other rows. Of equal logits the lower id comes first. The first kernel scans each tile
of a row; the second merges a row's tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cuda.attention.scoring import softcap_scores
from quire.kernels.cuda.launch.pdl import launch_dependents, pdl_options, wait_for_previous

WIDTH = 4096  # of a tile
WARPS = 4

# Columns of `sums`, one row a tile.
MAX = tl.constexpr(0)  # its largest logit
SUM = tl.constexpr(1)  # of exp(logit - MAX)
HIGHER = tl.constexpr(2)  # the number of logits above that of the row's token
NUM_SUMS = tl.constexpr(3)


@triton.jit
def _load(logits, columns, mask, softcap, CAPPED: tl.constexpr):
    value = tl.load(logits + columns, mask=mask, other=float("-inf")).to(tl.float32)
    if CAPPED:
        value = tl.where(mask, softcap_scores(value, softcap), float("-inf"))
    return value


@triton.jit(do_not_specialize=["max_top"])
def _scan_tiles(
    logits, tokens, nums_top, sums, top_values, top_ids, row_stride, size, max_top, softcap,
    WIDTH: tl.constexpr, CAPPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    index = row * tl.num_programs(1) + tile
    row_logits = logits + row * row_stride
    columns = tile * WIDTH + tl.arange(0, WIDTH)
    inside = columns < size
    value = _load(row_logits, columns, inside, softcap, CAPPED)
    token = tl.load(tokens + row)
    own = _load(row_logits, token, token < size, softcap, CAPPED)
    top = tl.max(value, axis=0)
    tl.store(sums + index * NUM_SUMS + MAX, top)
    tl.store(sums + index * NUM_SUMS + SUM, tl.sum(tl.where(inside, tl.exp(value - top), 0.0), axis=0))
    tl.store(sums + index * NUM_SUMS + HIGHER, tl.sum((value > own).to(tl.float32), axis=0))
    for nth in range(tl.minimum(tl.load(nums_top + row), size).to(tl.int32)):
        best = tl.max(value, axis=0)
        best_id = tl.min(tl.where(inside & (value == best), columns, size), axis=0)
        tl.store(top_values + index * max_top + nth, best)
        tl.store(top_ids + index * max_top + nth, best_id)
        is_best = columns == best_id
        inside = inside & ~is_best
        value = tl.where(is_best, float("-inf"), value)


@triton.jit(do_not_specialize=["max_top", "num_tiles"])
def _merge_tiles(
    logits, tokens, nums_top, sums, top_values, top_ids, own_out, rank_out, ids_out, values_out,
    row_stride, size, max_top, num_tiles, softcap,
    LANES: tl.constexpr, CAPPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, LANES)
    is_tile = tiles < num_tiles
    index = row * num_tiles + tiles
    maxima = tl.load(sums + index * NUM_SUMS + MAX, mask=is_tile, other=float("-inf"))
    top = tl.max(maxima, axis=0)
    tile_sums = tl.load(sums + index * NUM_SUMS + SUM, mask=is_tile, other=0.0)
    log_sum = tl.log(tl.sum(tl.where(is_tile, tile_sums * tl.exp(maxima - top), 0.0), axis=0))
    token = tl.load(tokens + row)
    own = _load(logits + row * row_stride, token, token < size, softcap, CAPPED)
    higher = tl.sum(tl.load(sums + index * NUM_SUMS + HIGHER, mask=is_tile, other=0.0).to(tl.int64), axis=0)
    tl.store(own_out + row, own - top - log_sum)
    tl.store(rank_out + row, higher + 1)

    # A merge of sorted lists: each lane has the next entry of a tile's list, which has num_top entries or all ids.
    num_top = tl.minimum(tl.load(nums_top + row), size).to(tl.int32)
    cursor = tl.zeros([LANES], tl.int32)
    for nth in range(num_top):
        has_more = is_tile & (cursor < num_top)
        value = tl.load(top_values + index * max_top + cursor, mask=has_more, other=float("-inf"))
        ids = tl.load(top_ids + index * max_top + cursor, mask=has_more, other=size)
        best = tl.max(tl.where(ids < size, value, float("-inf")), axis=0)
        best_id = tl.min(tl.where(value == best, ids, size), axis=0)
        tl.store(ids_out + row * max_top + nth, best_id.to(tl.int64))
        tl.store(values_out + row * max_top + nth, best - top - log_sum)
        cursor += (ids == best_id).to(tl.int32)


def logprobs(
    logits: Tensor, tokens: Tensor, nums_top: Tensor, max_top: int, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits [n, vocab] before any cap, tokens [n] int64, nums_top [n]: the number of top tokens of each row.

    -> log probabilities [n] float32 and ranks [n] int64 (from 1) of the tokens; ids [n, max_top] int64 and log
    probabilities [n, max_top] of the top tokens. Entries after a row's number are undefined.
    """
    rows, size = logits.shape
    max_top = min(max_top, size)
    num_tiles, device = triton.cdiv(size, WIDTH), logits.device
    assert logits.stride(1) == 1
    sums = torch.empty(rows * num_tiles * NUM_SUMS.value, dtype=torch.float32, device=device)
    top_values = torch.empty(rows * num_tiles * max_top, dtype=torch.float32, device=device)
    top_ids = torch.empty(rows * num_tiles * max_top, dtype=torch.int32, device=device)
    own, values = (torch.empty(*shape, dtype=torch.float32, device=device) for shape in ((rows,), (rows, max_top)))
    ranks, ids = (torch.empty(*shape, dtype=torch.int64, device=device) for shape in ((rows,), (rows, max_top)))
    options = {"CAPPED": softcap is not None, "num_warps": WARPS, **pdl_options()}
    _scan_tiles[(rows, num_tiles)](
        logits, tokens, nums_top, sums, top_values, top_ids, logits.stride(0), size, max_top, softcap or 0.0,
        WIDTH=WIDTH, **options,
    )  # fmt: skip
    _merge_tiles[(rows,)](
        logits, tokens, nums_top, sums, top_values, top_ids, own, ranks, ids, values, logits.stride(0), size, max_top,
        num_tiles, softcap or 0.0, LANES=triton.next_power_of_2(num_tiles), **options,
    )  # fmt: skip
    return own, ranks, ids, values
