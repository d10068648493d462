"""The running softmax that all kernels of attention share: a tile of keys and values is read, scored and taken in.

Scores are kept as powers of two, which is what the hardware can raise. A tile that every query sees whole is not
masked; with `enable_fp_fusion=False` both ways give the same bits.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cuda.scoring import soften

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def read_tile(
    keys, values, table, places, seen, columns, block_stride, head_at, DIM: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """A tile's keys and values, [places, columns] each; zeros where nothing is seen."""
    if IS_MASKED:
        block = tl.load(table + places // PAGE, mask=seen, other=0).to(tl.int64)
    else:
        block = tl.load(table + places // PAGE).to(tl.int64)
    at = (block * block_stride + head_at + places % PAGE * DIM)[:, None] + columns[None, :]
    if IS_MASKED:
        wanted = seen[:, None] & (columns < DIM)[None, :]
        key, value = tl.load(keys + at, mask=wanted, other=0.0), tl.load(values + at, mask=wanted, other=0.0)
    elif DIM < WIDTH:
        wanted = (columns < DIM)[None, :]
        key, value = tl.load(keys + at, mask=wanted, other=0.0), tl.load(values + at, mask=wanted, other=0.0)
    else:
        key, value = tl.load(keys + at), tl.load(values + at)
    return key, value


@triton.jit
def score(products, distance, scale, cap, slope, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr):
    """From products of queries and keys to powers of two; `distance` is where a key lies, counted from its query."""
    if HAS_CAP or HAS_SLOPES:
        scores = products * scale
        if HAS_CAP:
            scores = soften(scores, cap)
        if HAS_SLOPES:
            scores += slope * distance.to(tl.float32)
        scores *= LOG2_E
    else:
        scores = products * (scale * LOG2_E)
    return scores


@triton.jit
def absorb(
    query, key, value, seen, distance, top, mass, total, scale, cap, slope, IS_MASKED: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
):  # fmt: skip
    """Take one tile in: what is the largest score so far, the weights' sum, and the values' weighted sum."""
    key, value = key.to(query.dtype), value.to(query.dtype)
    products = tl.dot(query, tl.trans(key), input_precision="ieee")
    scores = score(products, distance, scale, cap, slope, HAS_CAP, HAS_SLOPES)
    if IS_MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, axis=1))
    safe = tl.where(higher == float("-inf"), 0.0, higher) if IS_MASKED else higher
    weights = tl.exp2(scores - safe[:, None])
    fading = tl.exp2(top - safe)
    mass = mass * fading + tl.sum(weights, axis=1)
    total = tl.dot(weights.to(value.dtype), value, total * fading[:, None], input_precision="ieee")
    return higher, mass, total


@triton.jit
def join_parts(
    parts, tops, first_part, count, columns, is_query, inside, QUERIES: tl.constexpr, WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """What several programs have found for the same queries, in their order: sums of weights and weighted values.

    AT_ONCE parts are on their way together.
    """
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, WIDTH], tl.float32)
    for first in range(0, count, AT_ONCE):
        for nth in tl.static_range(AT_ONCE):
            is_there = first + nth < count
            its = first_part + (first + nth) * QUERIES
            wanted = is_query & is_there
            its_top = tl.load(tops + its * 2, mask=wanted, other=float("-inf"), cache_modifier=".cg")
            its_mass = tl.load(tops + its * 2 + 1, mask=wanted, other=0.0, cache_modifier=".cg")
            at = parts + its[:, None] * WIDTH + columns[None, :]
            part = tl.load(at, mask=inside & is_there, other=0.0, cache_modifier=".cg")
            higher = tl.maximum(top, its_top)
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            fading, factor = tl.exp2(top - safe), tl.exp2(its_top - safe)
            mass = mass * fading + its_mass * factor
            total = total * fading[:, None] + part * factor[:, None]
            top = higher
    return mass, total


@cache
def workspace(programs: int, queries: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the parts of so many programs, shared by all layers and steps, and how many have arrived of each pair.

    It never grows or moves: graphs point to it.
    """
    parts = torch.empty(programs * queries * width, dtype=torch.float32, device=device)
    tops = torch.empty(programs * queries * 2, dtype=torch.float32, device=device)
    return parts, tops, torch.zeros(programs, dtype=torch.int32, device=device)
