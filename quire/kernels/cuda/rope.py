"""RoPE and the cache write in one kernel, which reads the projections once.

Queries and keys are rotated in place, and keys and values are stored in their slots. A token of slot -1 is not stored:
the padding rows of a captured batch have that slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cuda.launch.pdl import launch_dependents, pdl_options, wait_for_previous
from quire.kernels.paging import LayerCache

HEADS = 8  # in a program
MOST = {torch.float8_e4m3fn: 448.0, torch.float16: 65504.0, torch.bfloat16: 3.3895e38, torch.float32: 3.4028e38}
FP8_MAX, FP16_MAX = tl.constexpr(448.0), tl.constexpr(65504.0)
OTHER_MAX = tl.constexpr(3.3895e38)


@triton.jit
def fit(x, like):
    """x in the cache's type, clamped to its finite range. NaN becomes finite too. So the cache is finite everywhere,
    and its values times zero are zero: attention relies on that."""
    most: tl.constexpr = (
        FP8_MAX
        if like.dtype.element_ty == tl.float8e4nv
        else (FP16_MAX if like.dtype.element_ty == tl.float16 else OTHER_MAX)
    )
    return tl.clamp(x.to(tl.float32), -most, most).to(like.dtype.element_ty)


@triton.jit
def _rotate_pair(a, b, cosines, sines):
    return a * cosines - b * sines, b * cosines + a * sines


@triton.jit
def _rope_store(
    q, k, v, positions, table, keys, values, slots, q_row, k_row, v_row, num_q, num_kv, block_size, block_stride,
    head_stride, DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    slot = tl.load(slots + token)
    slot_offset = slot // block_size * block_stride + slot % block_size * DIM
    pairs = tl.arange(0, HALF)
    first = 2 * pairs if INTERLEAVED else pairs
    second = first + 1 if INTERLEAVED else pairs + ROTARY_DIM // 2
    exists = (pairs < ROTARY_DIM // 2)[None, :]
    position = tl.load(positions + token)
    row = table + position * ROTARY_DIM
    cosines = tl.load(row + pairs, mask=pairs < ROTARY_DIM // 2, other=0.0)[None, :]
    sines = tl.load(row + ROTARY_DIM // 2 + pairs, mask=pairs < ROTARY_DIM // 2, other=0.0)[None, :]

    if tl.program_id(1) * HEADS < num_q:
        is_q = (heads < num_q)[:, None] & exists
        q_ptrs = q + token * q_row + heads[:, None] * DIM
        a = tl.load(q_ptrs + first[None, :], mask=is_q, other=0.0).to(tl.float32)
        b = tl.load(q_ptrs + second[None, :], mask=is_q, other=0.0).to(tl.float32)
        a, b = _rotate_pair(a, b, cosines, sines)
        tl.store(q_ptrs + first[None, :], a.to(q.dtype.element_ty), mask=is_q)
        tl.store(q_ptrs + second[None, :], b.to(q.dtype.element_ty), mask=is_q)

    if (tl.program_id(1) + 1) * HEADS > num_q:
        key_heads = heads - num_q
        stored = (key_heads >= 0) & (key_heads < num_kv) & (slot >= 0)
        is_k = stored[:, None] & exists
        k_ptrs = k + token * k_row + key_heads[:, None] * DIM
        a = tl.load(k_ptrs + first[None, :], mask=is_k, other=0.0).to(tl.float32)
        b = tl.load(k_ptrs + second[None, :], mask=is_k, other=0.0).to(tl.float32)
        a, b = _rotate_pair(a, b, cosines, sines)
        a, b = a.to(k.dtype.element_ty), b.to(k.dtype.element_ty)
        tl.store(k_ptrs + first[None, :], a, mask=is_k)
        tl.store(k_ptrs + second[None, :], b, mask=is_k)
        key_ptrs = keys + slot_offset + key_heads[:, None] * head_stride
        tl.store(key_ptrs + first[None, :], fit(a, keys), mask=is_k)
        tl.store(key_ptrs + second[None, :], fit(b, keys), mask=is_k)

        columns = tl.arange(0, WIDTH)
        if ROTARY_DIM < DIM:
            is_rest = stored[:, None] & ((columns >= ROTARY_DIM) & (columns < DIM))[None, :]
            rest = tl.load(k_ptrs + columns[None, :], mask=is_rest, other=0.0)
            tl.store(key_ptrs + columns[None, :], fit(rest, keys), mask=is_rest)

        is_v = stored[:, None] & (columns < DIM)[None, :]
        v_ptrs = v + token * v_row + key_heads[:, None] * DIM
        value_ptrs = values + slot_offset + key_heads[:, None] * head_stride
        value = tl.load(v_ptrs + columns[None, :], mask=is_v, other=0.0)
        tl.store(value_ptrs + columns[None, :], fit(value, values), mask=is_v)


def rope_store(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, table: Tensor, interleaved: bool, cache: LayerCache,
    slots: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotate q and k [tokens, heads, dim] in place, and store k and v in the cache."""
    tokens, num_q, dim = q.shape
    num_kv = k.shape[1]
    assert all(x.stride(2) == 1 and x.stride(1) == dim for x in (q, k, v))
    if tokens:
        rotary_dim = table.shape[1]
        grid = (tokens, triton.cdiv(num_q + num_kv, HEADS))
        _rope_store[grid](
            q, k, v, positions, table, cache.k, cache.v, slots, q.stride(0), k.stride(0), v.stride(0), num_q, num_kv,
            cache.block_size, cache.k.stride(0), cache.k.stride(1), DIM=dim, ROTARY_DIM=rotary_dim,
            INTERLEAVED=interleaved, HEADS=HEADS, HALF=triton.next_power_of_2(rotary_dim // 2),
            WIDTH=triton.next_power_of_2(dim), num_warps=2, **pdl_options(),
        )  # fmt: skip
    return q, k


@triton.jit
def _store(
    k, v, keys, values, slots, k_row, v_row, num_kv, block_size, block_stride, head_stride, DIM: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    columns = tl.arange(0, WIDTH)[None, :]
    slot = tl.load(slots + token)
    inside = (heads < num_kv) & (columns < DIM) & (slot >= 0)
    offsets = slot // block_size * block_stride + slot % block_size * DIM + heads * head_stride + columns
    key = tl.load(k + token * k_row + heads * DIM + columns, mask=inside, other=0.0)
    value = tl.load(v + token * v_row + heads * DIM + columns, mask=inside, other=0.0)
    tl.store(keys + offsets, fit(key, keys), mask=inside)
    tl.store(values + offsets, fit(value, values), mask=inside)


def store_kv(k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> None:
    """As in the reference, for layers that are not rotated. A token whose slot is -1 is stored nowhere."""
    tokens, num_kv, dim = k.shape
    assert all(x.stride(2) == 1 and x.stride(1) == dim for x in (k, v))
    if tokens:
        _store[(tokens, triton.cdiv(num_kv, HEADS))](
            k, v, cache.k, cache.v, slots, k.stride(0), v.stride(0), num_kv, cache.block_size, cache.k.stride(0),
            cache.k.stride(1), DIM=dim, HEADS=HEADS, WIDTH=triton.next_power_of_2(dim), num_warps=2, **pdl_options(),
        )  # fmt: skip
