"""The running softmax that all kernels of attention share: a tile of keys and values is read, scored and taken in.

Scores are kept as powers of two, which is what the hardware can raise. A tile that every query sees whole is not
masked; with `enable_fp_fusion=False` both ways give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.cuda.attention.scoring import softcap_scores

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_tile(
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
            scores = softcap_scores(scores, cap)
        if HAS_SLOPES:
            scores += slope * distance.to(tl.float32)
        scores *= LOG2_E
    else:
        scores = products * (scale * LOG2_E)
    return scores


@triton.jit
def update_softmax(
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
