"""Experts of one token: products with single rows, without tensor cores, and the sum of the outputs in the second."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cuda.experts.tiles import activate_gated
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
def _one_gate_up(
    x, weight, bias, y, ids, num_out, num_in, limit, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = (outputs < num_out)[:, None]
    rank = tl.program_id(1)
    wait_for_previous(PDL)
    expert = tl.load(ids + rank).to(tl.int64)
    rows = weight + (expert * 2 * num_out + outputs[:, None]) * num_in
    gate = _dot_rows(rows, x, is_output, num_in, INPUTS, OUTPUTS)
    up = _dot_rows(rows + num_out * num_in, x, is_output, num_in, INPUTS, OUTPUTS)
    if HAS_BIAS:
        biases = bias + expert * 2 * num_out + outputs
        gate += tl.load(biases, mask=outputs < num_out, other=0.0).to(tl.float32)
        up += tl.load(biases + num_out, mask=outputs < num_out, other=0.0).to(tl.float32)
    gate, up = gate.to(y.dtype.element_ty).to(tl.float32), up.to(y.dtype.element_ty).to(tl.float32)
    value = activate_gated(gate, up, limit, ACTIVATION)
    tl.store(y + rank * num_out + outputs, value.to(y.dtype.element_ty), mask=outputs < num_out)


@triton.jit
def _one_down(
    x, weight, bias, y, ids, factors, shared, shared_gate, num_out, num_in, TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_GATE: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = (outputs < num_out)[:, None]
    wait_for_previous(PDL)
    total = tl.zeros([OUTPUTS], tl.float32)
    if HAS_SHARED:
        total = tl.load(shared + outputs, mask=outputs < num_out, other=0.0).to(tl.float32)
        if HAS_GATE:
            total *= tl.sigmoid(tl.load(shared_gate).to(tl.float32))
    for rank in tl.static_range(TOP_K):
        expert = tl.load(ids + rank).to(tl.int64)
        rows = weight + (expert * num_out + outputs[:, None]) * num_in
        part = _dot_rows(rows, x + rank * num_in, is_output, num_in, INPUTS, OUTPUTS)
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
        x, weights.gate_up.data, x if bias is None else bias, inner, ids, size, hidden_size, weights.limit,
        ACTIVATION=weights.activation, HAS_BIAS=bias is not None, OUTPUTS=first[0], INPUTS=first[1],
        num_warps=first[2], **pdl_options(),
    )  # fmt: skip
    y, bias = torch.empty(1, hidden_size, dtype=x.dtype, device=x.device), weights.down_bias
    _one_down[(triton.cdiv(hidden_size, second[0]),)](
        inner, weights.down.data, x if bias is None else bias, y, ids, factors, x if shared is None else shared,
        x if shared_gate is None else shared_gate, hidden_size, size, TOP_K=top_k, HAS_BIAS=bias is not None,
        HAS_SHARED=shared is not None, HAS_GATE=shared_gate is not None, OUTPUTS=second[0], INPUTS=second[1],
        num_warps=second[2], **pdl_options(),
    )  # fmt: skip
    return y


def fit(num_in: int) -> tuple[int, int, int]:
    return OUTPUTS, min(INPUTS, triton.next_power_of_2(num_in)), WARPS
