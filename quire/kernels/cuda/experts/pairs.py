"""Which (token, expert) pairs a program computes. Pair p is the choice p % top_k of token p // top_k.

Pairs of one expert share its weights, so they are computed in tiles. For few tokens each program finds
its own pairs among all ids: no kernel before it sorts. For more, `sort_pairs` lists them by expert, on the device, and
a tile's program finds its expert from the experts' counts. Grids depend on the number of tokens only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cuda.launch.pdl import launch_dependents, pdl_options, wait_for_previous

SORT_WIDTH = 1024  # pairs that a program of `_sort_pairs` reads at once


@triton.jit
def scan_pairs(ids, nth, num_pairs, BY_PAIR: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr):
    """The expert of program `nth`, and its pairs, [ROWS], in order; how many there are.

    With BY_PAIR the program has the expert of pair `nth`, unless an earlier pair has the same; then it has no pairs.
    Otherwise it has expert `nth`.
    """
    index, lanes = tl.arange(0, PAIRS), tl.arange(0, ROWS)
    all_ids = tl.load(ids + index, mask=index < num_pairs, other=-1)
    expert = tl.load(ids + nth) if BY_PAIR else nth
    is_own = all_ids == expert
    count = tl.sum(is_own.to(tl.int32), axis=0)
    if BY_PAIR:
        first = tl.min(tl.where(is_own, index, PAIRS), axis=0)
        count = tl.where(first == nth, count, 0)
    places = tl.where(is_own, tl.cumsum(is_own.to(tl.int32), axis=0) - 1, -1)
    pairs = tl.sum(tl.where(places[None, :] == lanes[:, None], index[None, :], 0), axis=1)
    return expert, pairs, tl.minimum(count, ROWS)


@triton.jit
def find_tile(counts, order, tile, num_experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """The expert of a tile of sorted pairs, the pairs [ROWS] and how many there are: 0 for a tile behind the last."""
    experts, lanes = tl.arange(0, EXPERTS), tl.arange(0, ROWS)
    sizes = tl.load(counts + experts, mask=experts < num_experts, other=0)
    tiles = (sizes + ROWS - 1) // ROWS
    expert = tl.sum((tl.cumsum(tiles, axis=0) <= tile).to(tl.int32), axis=0)
    is_before = experts < expert
    nth = tile - tl.sum(tl.where(is_before, tiles, 0), axis=0)
    size = tl.sum(tl.where(experts == expert, sizes, 0), axis=0)
    count = tl.minimum(tl.maximum(size - nth * ROWS, 0), ROWS)
    first = tl.sum(tl.where(is_before, sizes, 0), axis=0) + nth * ROWS
    return expert, tl.load(order + first + lanes, mask=lanes < count, other=0), count


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_pairs(ids, counts, order, num_pairs, WIDTH: tl.constexpr, PDL: tl.constexpr):
    launch_dependents(PDL)
    wait_for_previous(PDL)
    expert = tl.program_id(0)
    within = tl.arange(0, WIDTH)
    smaller, own = tl.zeros([WIDTH], tl.int32), tl.zeros([WIDTH], tl.int32)
    for start in range(0, num_pairs, WIDTH):
        tile = tl.load(ids + start + within, mask=start + within < num_pairs, other=0x7FFFFFFF)
        smaller += (tile < expert).to(tl.int32)
        own += (tile == expert).to(tl.int32)
    place = tl.sum(smaller, axis=0)
    tl.store(counts + expert, tl.sum(own, axis=0))
    for start in range(0, num_pairs, WIDTH):
        tile = tl.load(ids + start + within, mask=start + within < num_pairs, other=0x7FFFFFFF)
        is_own = tile == expert
        ends = tl.cumsum(is_own.to(tl.int32), axis=0)
        tl.store(order + place + ends - 1, start + within, mask=is_own)
        place += tl.sum(is_own.to(tl.int32), axis=0)


def sort_pairs(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """ids [tokens, top_k] -> the number of pairs of each expert, and the pairs in the order of experts. A counting sort
    without atomics: each expert's program counts the pairs before its own."""
    counts = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    order = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
    _sort_pairs[(num_experts,)](ids, counts, order, ids.numel(), WIDTH=SORT_WIDTH, num_warps=4, **pdl_options())
    return counts, order
