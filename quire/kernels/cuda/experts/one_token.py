"""Experts of one token: products with single rows, without tensor cores, and the sum of the outputs in the second."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cuda.experts.mxfp4 import unpack_high, unpack_low
from quire.kernels.cuda.experts.tiles import activate_gated, stored
from quire.kernels.cuda.launch.pdl import launch_dependents, pdl_options, wait_for_previous
from quire.kernels.routing import ExpertWeights

OUTPUTS, INPUTS, WARPS = 4, 2048, 4  # measured on an H200, with experts of 768 to 14,336


@triton.jit
def _dot_rows(rows, x, is_output, num_in, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr):
    """Products of rows [OUTPUTS, 1] with one vector, [OUTPUTS]."""
    inputs = tl.arange(0, INPUTS)
    total = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    for start in range(0, num_in, INPUTS):
        in_range = start + inputs < num_in
        row = tl.load(rows + start + inputs[None, :], mask=is_output & in_range[None, :], other=0.0).to(tl.float32)
        total += row * tl.load(x + start + inputs, mask=in_range, other=0.0).to(tl.float32)[None, :]
    return tl.sum(total, axis=1)


@triton.jit
def _dot_packed(codes, scales, rows, x, is_output, num_in, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr):
    """Products of rows [OUTPUTS] of codes of `quant/mxfp4_codes.py` with one vector, [OUTPUTS]. Tiles are
    [OUTPUTS, chunks, groups, 32]."""
    CHUNKS: tl.constexpr = INPUTS // 128
    num_chunks = tl.cdiv(num_in, 128)
    chunk = tl.arange(0, CHUNKS)[None, :, None, None]
    group, within = tl.arange(0, 2)[None, None, :, None], tl.arange(0, 32)[None, None, None, :]
    row, exists = rows[:, None, None, None], is_output[:, None, None, None]
    total = tl.zeros([OUTPUTS, CHUNKS, 2, 32], tl.float32)
    for first in range(0, num_chunks, CHUNKS):
        nth = first + chunk
        mask = exists & (nth < num_chunks)
        code = tl.load(codes + (row * num_chunks + nth) * 64 + group * 32 + within, mask=mask, other=0)
        scale_ptrs = scales + (row * num_chunks + nth) * 4 + group * 2
        columns = nth * 128 + group * 32 + within
        low = tl.load(x + columns, mask=columns < num_in, other=0.0).to(tl.float32)
        high = tl.load(x + columns + 64, mask=columns + 64 < num_in, other=0.0).to(tl.float32)
        total += unpack_low(code, tl.load(scale_ptrs, mask=mask, other=0), tl.float32) * low
        total += unpack_high(code, tl.load(scale_ptrs + 1, mask=mask, other=0), tl.float32) * high
    return tl.sum(tl.reshape(total, [OUTPUTS, CHUNKS * 64]), axis=1)


@triton.jit
def _product(
    weight, scales, row, x, is_output, num_in, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, IS_PACKED: tl.constexpr
):  # fmt: skip
    """Products of rows [OUTPUTS] with one vector."""
    if IS_PACKED:
        return _dot_packed(weight, scales, row, x, is_output, num_in, INPUTS, OUTPUTS)
    return _dot_rows(weight + row[:, None] * num_in, x, is_output[:, None], num_in, INPUTS, OUTPUTS)


@triton.jit
def _one_gate_up(
    x, weight, scales, bias, y, ids, num_out, num_in, limit, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, IS_PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = outputs < num_out
    rank = tl.program_id(1)
    wait_for_previous(PDL)
    expert = tl.load(ids + rank).to(tl.int64)
    row = expert * 2 * num_out + outputs
    gate = _product(weight, scales, row, x, is_output, num_in, INPUTS, OUTPUTS, IS_PACKED)
    up = _product(weight, scales, row + num_out, x, is_output, num_in, INPUTS, OUTPUTS, IS_PACKED)
    if HAS_BIAS:
        biases = bias + expert * 2 * num_out + outputs
        gate += tl.load(biases, mask=outputs < num_out, other=0.0).to(tl.float32)
        up += tl.load(biases + num_out, mask=outputs < num_out, other=0.0).to(tl.float32)
    gate, up = gate.to(y.dtype.element_ty).to(tl.float32), up.to(y.dtype.element_ty).to(tl.float32)
    value = activate_gated(gate, up, limit, ACTIVATION)
    tl.store(y + rank * num_out + outputs, value.to(y.dtype.element_ty), mask=outputs < num_out)


@triton.jit
def _one_down(
    x, weight, scales, bias, y, ids, factors, shared, shared_gate, num_out, num_in, TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_GATE: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, IS_PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = outputs < num_out
    wait_for_previous(PDL)
    total = tl.zeros([OUTPUTS], tl.float32)
    if HAS_SHARED:
        total = tl.load(shared + outputs, mask=outputs < num_out, other=0.0).to(tl.float32)
        if HAS_GATE:
            total *= tl.sigmoid(tl.load(shared_gate).to(tl.float32))
    for rank in tl.static_range(TOP_K):
        expert = tl.load(ids + rank).to(tl.int64)
        row = expert * num_out + outputs
        part = _product(weight, scales, row, x + rank * num_in, is_output, num_in, INPUTS, OUTPUTS, IS_PACKED)
        if HAS_BIAS:
            part += tl.load(bias + expert * num_out + outputs, mask=outputs < num_out, other=0.0).to(tl.float32)
        total += part.to(y.dtype.element_ty).to(tl.float32) * tl.load(factors + rank)
    tl.store(y + outputs, total.to(y.dtype.element_ty), mask=outputs < num_out)


def experts_of_one(
    x: Tensor,
    routes: tuple[Tensor, Tensor],
    weights: ExpertWeights,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    shape: tuple[tuple[int, int, int], tuple[int, int, int]] | None = None,
) -> Tensor:
    """The op `experts` for x [1, hidden_size]. `shape`: outputs, inputs and warps of a program, of both kernels."""
    ids, factors = routes
    top_k, size, hidden_size = ids.shape[1], weights.size, weights.hidden_size
    first, second = shape or (fit(hidden_size), fit(size))
    inner = torch.empty(top_k, size, dtype=x.dtype, device=x.device)
    bias = weights.gate_up_bias
    _one_gate_up[(triton.cdiv(size, first[0]), top_k)](
        x, *stored(weights.gate_up), x if bias is None else bias, inner, ids, size, hidden_size, weights.limit,
        ACTIVATION=weights.activation, HAS_BIAS=bias is not None, OUTPUTS=first[0], INPUTS=first[1],
        IS_PACKED=weights.gate_up.data is None, num_warps=first[2], **pdl_options(),
    )  # fmt: skip
    y, bias = torch.empty(1, hidden_size, dtype=x.dtype, device=x.device), weights.down_bias
    _one_down[(triton.cdiv(hidden_size, second[0]),)](
        inner, *stored(weights.down), x if bias is None else bias, y, ids, factors, x if shared is None else shared,
        x if shared_gate is None else shared_gate, hidden_size, size, TOP_K=top_k, HAS_BIAS=bias is not None,
        HAS_SHARED=shared is not None, HAS_GATE=shared_gate is not None, OUTPUTS=second[0], INPUTS=second[1],
        IS_PACKED=weights.down.data is None, num_warps=second[2], **pdl_options(),
    )  # fmt: skip
    return y


def fit(num_in: int) -> tuple[int, int, int]:
    return OUTPUTS, min(INPUTS, max(128, triton.next_power_of_2(num_in))), WARPS
