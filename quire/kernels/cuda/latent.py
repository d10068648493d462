"""The ops around latent attention (MLA): norm, rotation and the cache write in one kernel, and products of each head
with a matrix of its own."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import reference
from quire.kernels.cuda.launch.pdl import launch_dependents, pdl_options, wait_for_previous
from quire.kernels.cuda.rope import fit
from quire.kernels.paging import LayerCache

HEADS = 16  # of a program that rotates queries


@triton.jit
def _rotate(x, exists, pairs, cosines, sines, INTERLEAVED: tl.constexpr, ROTATED: tl.constexpr):
    """Numbers to rotate, at x + their index: the rotated first and second of each pair, and their indices."""
    first = 2 * pairs if INTERLEAVED else pairs
    second = first + 1 if INTERLEAVED else pairs + ROTATED // 2
    a = tl.load(x + first, mask=exists, other=0.0).to(tl.float32)
    b = tl.load(x + second, mask=exists, other=0.0).to(tl.float32)
    return a * cosines - b * sines, b * cosines + a * sines, first, second


@triton.jit
def _rope_store_latent(
    q, kv, weight, positions, table, keys, slots, q_row, kv_row, num_heads, eps, block_size, block_stride,
    QUERY: tl.constexpr, RANK: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, WIDTH: tl.constexpr,
    HALF: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first program of a token has its latent, the others have heads of its query."""
    launch_dependents(PDL)
    columns, pairs = tl.arange(0, WIDTH), tl.arange(0, HALF)
    is_pair = pairs < ROTATED // 2
    part = tl.program_id(1)
    scale = tl.load(weight + columns, mask=columns < RANK, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    angles = table + tl.load(positions + token) * ROTATED
    cosines = tl.load(angles + pairs, mask=is_pair, other=0.0)
    sines = tl.load(angles + ROTATED // 2 + pairs, mask=is_pair, other=0.0)
    if part == 0:
        slot = tl.load(slots + token)
        target = keys + slot // block_size * block_stride + slot % block_size * (RANK + ROTATED)
        inside = (columns < RANK) & (slot >= 0)
        values = tl.load(kv + token * kv_row + columns, mask=columns < RANK, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(values * values, axis=0) / RANK + eps)
        normed = (values * factor * scale).to(kv.dtype.element_ty)
        tl.store(target + columns, fit(normed, keys), mask=inside)
        tl.store(kv + token * kv_row + columns, normed, mask=columns < RANK)
        a, b, first, second = _rotate(kv + token * kv_row + RANK, is_pair, pairs, cosines, sines, INTERLEAVED, ROTATED)
        stored = is_pair & (slot >= 0)
        tl.store(kv + token * kv_row + RANK + first, a.to(kv.dtype.element_ty), mask=is_pair)
        tl.store(kv + token * kv_row + RANK + second, b.to(kv.dtype.element_ty), mask=is_pair)
        tl.store(target + RANK + first, fit(a.to(kv.dtype.element_ty), keys), mask=stored)
        tl.store(target + RANK + second, fit(b.to(kv.dtype.element_ty), keys), mask=stored)
    else:
        heads = (part - 1) * HEADS + tl.arange(0, HEADS)
        ends = q + token * q_row + heads[:, None] * QUERY + QUERY - ROTATED
        exists = (heads < num_heads)[:, None] & is_pair[None, :]
        firsts, seconds, even, odd = _rotate(
            ends, exists, pairs[None, :], cosines[None, :], sines[None, :], INTERLEAVED, ROTATED
        )
        tl.store(ends + even, firsts.to(q.dtype.element_ty), mask=exists)
        tl.store(ends + odd, seconds.to(q.dtype.element_ty), mask=exists)


def rope_store_latent(
    q: Tensor, kv: Tensor, weight: Tensor, eps: float, positions: Tensor, table: Tensor, interleaved: bool,
    cache: LayerCache, slots: Tensor,
) -> Tensor:  # fmt: skip
    """`rope_latent` and `store_latent`, in place: q [tokens, heads, dim + rotated] and kv [tokens, 1, rank + rotated].
    Returns q."""
    tokens, heads, query_dim = q.shape
    rank, rotated = weight.shape[0], table.shape[1]
    assert q.stride(2) == kv.stride(2) == 1
    assert q.stride(1) == query_dim
    if tokens:
        _rope_store_latent[(tokens, 1 + triton.cdiv(heads, HEADS))](
            q, kv, weight, positions, table, cache.k, slots, q.stride(0), kv.stride(0), heads, eps, cache.block_size,
            cache.k.stride(0), QUERY=query_dim, RANK=rank, ROTATED=rotated, INTERLEAVED=interleaved,
            WIDTH=triton.next_power_of_2(rank), HALF=triton.next_power_of_2(rotated // 2), HEADS=HEADS, num_warps=4,
            **pdl_options(),
        )  # fmt: skip
    return q


def store_latent(kv: Tensor, rank: int, cache: LayerCache, slots: Tensor) -> None:
    by_token = LayerCache(cache.k.transpose(1, 2), cache.v.transpose(1, 2), cache.group, cache.block_size)
    reference.store_latent(kv, rank, by_token, slots)


@triton.jit(do_not_specialize=["num_tokens"])
def _head_linear(
    x, weight, y, num_tokens, num_tiles, x_row, x_head, cols, out, rest, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, REST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    head, tile = tl.program_id(1), tl.program_id(2)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = (rows < num_tokens)[None, :]
    x_ptrs = x + rows.to(tl.int64)[None, :] * x_row + head * x_head
    y_ptrs = y + (rows.to(tl.int64)[None, :] * tl.num_programs(1) + head) * (out + rest)
    if tile < num_tiles:
        outputs, inputs = tile * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, INPUTS)
        weights = weight + (head * out + outputs).to(tl.int64)[:, None] * cols + inputs[None, :]
        is_output = (outputs < out)[:, None]
        total = tl.zeros([OUTPUTS, ROWS], tl.float32)
        wait_for_previous(PDL)
        for start in range(0, cols, INPUTS):
            in_range = start + inputs < cols
            w_tile = tl.load(weights + start, mask=is_output & in_range[None, :], other=0.0)
            x_tile = tl.load(x_ptrs + start + inputs[:, None], mask=is_row & in_range[:, None], other=0.0)
            total = tl.dot(w_tile, x_tile, total, input_precision="ieee")
        tl.store(y_ptrs + outputs[:, None], total.to(y.dtype.element_ty), mask=is_row & is_output)
    else:
        wait_for_previous(PDL)
        ends = tl.arange(0, REST)[:, None]
        copied = tl.load(x_ptrs + cols + ends, mask=is_row & (ends < rest), other=0.0)
        tl.store(y_ptrs + out + ends, copied, mask=is_row & (ends < rest))


def head_linear(x: Tensor, weight: Any) -> Tensor:
    """As in the reference. A program computes some outputs of one head, for up to 64 tokens, or copies the rest."""
    tokens, heads, width = x.shape
    rows, cols = weight.shape
    out, rest = rows // heads, width - cols
    y = torch.empty(tokens, heads, out + rest, dtype=x.dtype, device=x.device)
    is_wide = x.dtype == torch.float32
    tile, inputs = 64, 32 if is_wide else 64
    tile_rows = min(32 if is_wide else 64, max(16, triton.next_power_of_2(tokens)))
    num_tiles = triton.cdiv(out, tile)
    assert x.stride(2) == 1
    if tokens:
        _head_linear[(triton.cdiv(tokens, tile_rows), heads, num_tiles + (rest > 0))](
            x, weight.data, y, tokens, num_tiles, x.stride(0), x.stride(1), cols, out, rest, ROWS=tile_rows,
            OUTPUTS=tile, INPUTS=inputs, REST=triton.next_power_of_2(max(rest, 1)), num_warps=4, num_stages=3,
            **pdl_options(),
        )  # fmt: skip
    return y
