"""Log probabilities of chosen tokens, their ranks, and the likeliest tokens, straight from the head's products.

What is said of a row depends on that row only. Of equal tokens the lower id is likelier. The first kernel looks at each
tile of a row, the second puts a row's tiles together.
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

# Columns of `sums`, what is known of a tile.
MAX = tl.constexpr(0)  # its largest logit
SUM = tl.constexpr(1)  # of exp(logit - MAX)
HIGHER = tl.constexpr(2)  # how many logits are above that of the row's token
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
    at = row * tl.num_programs(1) + tile
    mine = logits + row * row_stride
    columns = tile * WIDTH + tl.arange(0, WIDTH)
    inside = columns < size
    value = _load(mine, columns, inside, softcap, CAPPED)
    token = tl.load(tokens + row)
    own = _load(mine, token, token < size, softcap, CAPPED)
    top = tl.max(value, axis=0)
    tl.store(sums + at * NUM_SUMS + MAX, top)
    tl.store(sums + at * NUM_SUMS + SUM, tl.sum(tl.where(inside, tl.exp(value - top), 0.0), axis=0))
    tl.store(sums + at * NUM_SUMS + HIGHER, tl.sum((value > own).to(tl.float32), axis=0))
    for nth in range(tl.minimum(tl.load(nums_top + row), size).to(tl.int32)):
        best = tl.max(value, axis=0)
        its = tl.min(tl.where(inside & (value == best), columns, size), axis=0)
        tl.store(top_values + at * max_top + nth, best)
        tl.store(top_ids + at * max_top + nth, its)
        taken = columns == its
        inside = inside & ~taken
        value = tl.where(taken, float("-inf"), value)


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
    there = tiles < num_tiles
    at = row * num_tiles + tiles
    maxima = tl.load(sums + at * NUM_SUMS + MAX, mask=there, other=float("-inf"))
    top = tl.max(maxima, axis=0)
    parts = tl.load(sums + at * NUM_SUMS + SUM, mask=there, other=0.0)
    log_sum = tl.log(tl.sum(tl.where(there, parts * tl.exp(maxima - top), 0.0), axis=0))
    token = tl.load(tokens + row)
    own = _load(logits + row * row_stride, token, token < size, softcap, CAPPED)
    higher = tl.sum(tl.load(sums + at * NUM_SUMS + HIGHER, mask=there, other=0.0).to(tl.int64), axis=0)
    tl.store(own_out + row, own - top - log_sum)
    tl.store(rank_out + row, higher + 1)

    # A merge of sorted lists: each lane holds the next of its tile. A tile has as many as are wanted, or all it has.
    num_top = tl.minimum(tl.load(nums_top + row), size).to(tl.int32)
    cursor = tl.zeros([LANES], tl.int32)
    for nth in range(num_top):
        more = there & (cursor < num_top)
        value = tl.load(top_values + at * max_top + cursor, mask=more, other=float("-inf"))
        ids = tl.load(top_ids + at * max_top + cursor, mask=more, other=size)
        best = tl.max(tl.where(ids < size, value, float("-inf")), axis=0)
        its = tl.min(tl.where(value == best, ids, size), axis=0)
        tl.store(ids_out + row * max_top + nth, its.to(tl.int64))
        tl.store(values_out + row * max_top + nth, best - top - log_sum)
        cursor += (ids == its).to(tl.int32)


def logprobs(
    logits: Tensor, tokens: Tensor, nums_top: Tensor, max_top: int, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits [n, vocab] before any cap, tokens [n] int64, nums_top [n]: how many of the likeliest each row wants.

    -> log probabilities [n] float32 and ranks [n] int64 (from 1) of the tokens; ids [n, max_top] int64 and log
    probabilities [n, max_top] of the likeliest. Behind what a row wants there is no meaning.
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
