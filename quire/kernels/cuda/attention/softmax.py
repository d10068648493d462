"""The online softmax of the attention kernels: load a tile of keys and values, score it, and update the sums.

Scores are in base 2, because the hardware has exp2. A tile that every query sees whole is not masked. With
`enable_fp_fusion=False` masked and unmasked tiles give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.cuda.attention.scoring import softcap_scores

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_tile(
    keys, values, table, positions, visible, columns, block_stride, head_offset, DIM: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """A tile's keys and values, [positions, columns] each; zeros where the mask is False."""
    if IS_MASKED:
        block = tl.load(table + positions // PAGE, mask=visible, other=0).to(tl.int64)
    else:
        block = tl.load(table + positions // PAGE).to(tl.int64)
    offsets = (block * block_stride + head_offset + positions % PAGE * DIM)[:, None] + columns[None, :]
    if IS_MASKED:
        mask = visible[:, None] & (columns < DIM)[None, :]
        key, value = tl.load(keys + offsets, mask=mask, other=0.0), tl.load(values + offsets, mask=mask, other=0.0)
    elif DIM < WIDTH:
        mask = (columns < DIM)[None, :]
        key, value = tl.load(keys + offsets, mask=mask, other=0.0), tl.load(values + offsets, mask=mask, other=0.0)
    else:
        key, value = tl.load(keys + offsets), tl.load(values + offsets)
    return key, value


@triton.jit
def score(products, distance, scale, cap, slope, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr):
    """Products of queries and keys -> scores in base 2. `distance` is the key's position minus the query's."""
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
def add_sinks(mass, top, sinks, heads, is_query, HAS_SINKS: tl.constexpr):
    """The final sum of the weights, with those of the heads' sinks: scores of keys whose value is zero."""
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=is_query, other=0.0).to(tl.float32)
        mass += tl.exp2(sink * LOG2_E - top)
    return mass


@triton.jit
def update_softmax(
    query, key, value, visible, distance, top, mass, total, scale, cap, slope, IS_MASKED: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
):  # fmt: skip
    """Add one tile. Returns the largest score so far, the sum of the weights, and the weighted sum of the values."""
    key, value = key.to(query.dtype), value.to(query.dtype)
    products = tl.dot(query, tl.trans(key), input_precision="ieee")
    scores = score(products, distance, scale, cap, slope, HAS_CAP, HAS_SLOPES)
    if IS_MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, axis=1))
    safe = tl.where(higher == float("-inf"), 0.0, higher) if IS_MASKED else higher
    weights = tl.exp2(scores - safe[:, None])
    rescale = tl.exp2(top - safe)
    mass = mass * rescale + tl.sum(weights, axis=1)
    total = tl.dot(weights.to(value.dtype), value, total * rescale[:, None], input_precision="ieee")
    return higher, mass, total


@triton.jit
def load_transposed(
    keys, values, table, positions, visible, columns, block_stride, head_offset, DIM: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, IS_LARGE: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """A tile's keys [positions, columns] and values [columns, positions]; zeros where the mask is False.

    IS_LARGE: offsets in the cache need 64 bits.
    """
    if IS_MASKED:
        block = tl.load(table + positions // PAGE, mask=visible, other=0)
    else:
        block = tl.load(table + positions // PAGE)
    if IS_LARGE:
        block = block.to(tl.int64)
    offset = block * block_stride + head_offset + positions % PAGE * DIM
    key_ptrs, value_ptrs = keys + (offset[:, None] + columns[None, :]), values + (offset[None, :] + columns[:, None])
    is_column = columns < DIM
    if IS_MASKED:
        key = tl.load(key_ptrs, mask=visible[:, None] & is_column[None, :], other=0.0)
        value = tl.load(value_ptrs, mask=visible[None, :] & is_column[:, None], other=0.0)
    elif DIM < WIDTH:
        key = tl.load(key_ptrs, mask=is_column[None, :], other=0.0)
        value = tl.load(value_ptrs, mask=is_column[:, None], other=0.0)
    else:
        key, value = tl.load(key_ptrs), tl.load(value_ptrs)
    return key, value


@triton.jit
def update_transposed(
    query, key, value, visible, distance, top, mass, total, scale, cap, slope, IS_MASKED: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
):  # fmt: skip
    """`update_softmax`, transposed: query and total [dim, queries], mass [keys, queries], not yet summed over keys."""
    key, value = key.to(query.dtype), value.to(query.dtype)
    products = tl.dot(key, query, input_precision="ieee")
    scores = score(products, distance, scale, cap, slope, HAS_CAP, HAS_SLOPES)
    if IS_MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, axis=0))
    safe = tl.where(higher == float("-inf"), 0.0, higher) if IS_MASKED else higher
    weights = tl.exp2(scores - safe[None, :])
    rescale = tl.exp2(top - safe)[None, :]
    total = tl.dot(value, weights.to(value.dtype), total * rescale, input_precision="ieee")
    return higher, mass * rescale + weights, total
