"""Products of experts by tiles: an expert's weights are the left operand, and the tokens that chose it the columns.

`gate_up` computes activation(gate(x)) * up(x) of each pair, `down` the product behind it, and `add_outputs` adds each
token's outputs in the order of ranks, so the result does not depend on which program is last.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cuda.activation import gelu, silu
from quire.kernels.cuda.experts.mxfp4 import unpack_chunk
from quire.kernels.cuda.experts.pairs import find_tile, scan_pairs
from quire.kernels.cuda.launch.pdl import launch_dependents, pdl_options, wait_for_previous
from quire.kernels.routing import ExpertWeights

SILU_FACTOR = tl.constexpr(1.702)  # of gpt-oss's gate


class Tile(NamedTuple):
    """The tile of a program. `rows` are pairs."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


class Pairs(NamedTuple):
    """The pairs of a step: sorted by expert, or None and to be found by each program."""

    ids: Tensor  # [tokens, top_k] int32
    num_experts: int
    counts: Tensor | None = None
    order: Tensor | None = None

    @property
    def by_pair(self) -> bool:
        return self.ids.numel() < self.num_experts

    def num_tiles(self, rows: int) -> int:
        """Tiles of at most `rows` pairs of one expert: at least as many as there can be."""
        count = self.ids.numel()
        if self.counts is None:
            return min(count, self.num_experts)
        return min(count, count // rows + self.num_experts)


@triton.jit
def activate_gated(gate, up, limit, ACTIVATION: tl.constexpr):
    """As `reference_experts.gate`."""
    if ACTIVATION == "clamped_silu":
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        return gate * tl.sigmoid(SILU_FACTOR * gate) * up
    if ACTIVATION == "silu":
        return silu(gate) * up
    return gelu(gate) * up


@triton.jit
def _multiply_dense(
    values, matrix, outputs, is_output, is_row, num_out, num_in, IS_GATED: tl.constexpr, OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr, INPUTS: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Products with rows of an expert's matrix, and with those of up if it is gated, [OUTPUTS, ROWS] each."""
    inputs = tl.arange(0, INPUTS)
    weights = matrix + (outputs * num_in)[:, None] + inputs[None, :]
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    total_up = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in range(0, num_in, INPUTS):
        in_range = start + inputs < num_in
        mask = is_output & in_range[None, :]
        x_ptrs = values + (start + inputs)[:, None]
        x_tile = tl.load(x_ptrs, mask=is_row if IS_EVEN else is_row & in_range[:, None], other=0.0)
        w_tile = tl.load(weights + start) if IS_EVEN else tl.load(weights + start, mask=mask, other=0.0)
        total = tl.dot(w_tile, x_tile, total, input_precision="ieee")
        if IS_GATED:
            up_ptrs = weights + num_out * num_in + start
            w_tile = tl.load(up_ptrs) if IS_EVEN else tl.load(up_ptrs, mask=mask, other=0.0)
            total_up = tl.dot(w_tile, x_tile, total_up, input_precision="ieee")
    return total, total_up


@triton.jit
def _multiply_codes(
    values, codes, scales, first_row, outputs, is_output, is_row, num_out, num_in, IS_GATED: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The same with codes of `quant/mxfp4_codes.py`, a chunk at a time."""
    num_chunks = tl.cdiv(num_in, 128)
    rows = (first_row + outputs)[:, None]
    columns = tl.arange(0, 64)
    code_ptrs = codes + rows * (num_chunks * 64) + columns[None, :]
    scale_ptrs = scales + rows * (num_chunks * 4) + tl.arange(0, 4)[None, :]
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    total_up = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for chunk in range(num_chunks):
        low_inputs = chunk * 128 + columns[:, None]
        high_inputs = low_inputs + 64
        x_low = tl.load(values + low_inputs, mask=is_row & (low_inputs < num_in), other=0.0)
        x_high = tl.load(values + high_inputs, mask=is_row & (high_inputs < num_in), other=0.0)
        code = tl.load(code_ptrs + chunk * 64, mask=is_output, other=0)
        scale = tl.load(scale_ptrs + chunk * 4, mask=is_output, other=0)
        low, high = unpack_chunk(code, scale, OUTPUTS, values.dtype.element_ty)
        total = tl.dot(low, x_low, total, input_precision="ieee")
        total = tl.dot(high, x_high, total, input_precision="ieee")
        if IS_GATED:
            code = tl.load(code_ptrs + num_out * (num_chunks * 64) + chunk * 64, mask=is_output, other=0)
            scale = tl.load(scale_ptrs + num_out * (num_chunks * 4) + chunk * 4, mask=is_output, other=0)
            low, high = unpack_chunk(code, scale, OUTPUTS, values.dtype.element_ty)
            total_up = tl.dot(low, x_low, total_up, input_precision="ieee")
            total_up = tl.dot(high, x_high, total_up, input_precision="ieee")
    return total, total_up


@triton.jit(do_not_specialize=["num_pairs"])
def _experts(
    x, weight, scales, bias, y, ids, counts, order, num_pairs, num_experts, num_out, num_in, limit,
    DIVISOR: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PAIRS: tl.constexpr,
    EXPERTS: tl.constexpr, IS_SORTED: tl.constexpr, BY_PAIR: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_EVEN: tl.constexpr, IS_PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Row p // DIVISOR of x is the input of pair p, and row p of y its output. With an activation, an expert's rows of
    the weight are gate and up."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    if IS_SORTED:
        expert, pairs, count = find_tile(counts, order, tl.program_id(1), num_experts, EXPERTS, ROWS)
    else:
        expert, pairs, count = scan_pairs(ids, tl.program_id(1), num_pairs, BY_PAIR, PAIRS, ROWS)
    if count == 0:
        return
    is_gated: tl.constexpr = ACTIVATION != "none"
    parts: tl.constexpr = 2 if is_gated else 1
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = (outputs < num_out)[:, None]
    is_row = (tl.arange(0, ROWS) < count)[None, :]
    values = x + (pairs // DIVISOR).to(tl.int64)[None, :] * num_in
    first_row = expert.to(tl.int64) * parts * num_out
    if IS_PACKED:
        total, total_up = _multiply_codes(
            values, weight, scales, first_row, outputs, is_output, is_row, num_out, num_in, is_gated, OUTPUTS, ROWS
        )
    else:
        total, total_up = _multiply_dense(
            values, weight + first_row * num_in, outputs, is_output, is_row, num_out, num_in, is_gated, OUTPUTS, ROWS,
            INPUTS, IS_EVEN,
        )  # fmt: skip
    if HAS_BIAS:
        biases = bias + expert * parts * num_out + outputs
        total += tl.load(biases, mask=outputs < num_out, other=0.0).to(tl.float32)[:, None]
        if is_gated:
            total_up += tl.load(biases + num_out, mask=outputs < num_out, other=0.0).to(tl.float32)[:, None]
    if is_gated:
        gate = total.to(y.dtype.element_ty).to(tl.float32)
        up = total_up.to(y.dtype.element_ty).to(tl.float32)
        total = activate_gated(gate, up, limit, ACTIVATION)
    y_ptrs = y + pairs.to(tl.int64)[None, :] * num_out + outputs[:, None]
    tl.store(y_ptrs, total.to(y.dtype.element_ty), mask=is_row & is_output)


def stored(weight: Any) -> tuple[Tensor, Tensor]:
    """The matrix, or its codes, and the scales of these."""
    if weight.data is not None:
        return weight.data, weight.data
    return weight.codes, weight.scales


def gate_up(x: Tensor, pairs: Pairs, weights: ExpertWeights, tile: Tile, *, exact: bool = False) -> Tensor:
    """x [tokens, hidden_size] -> [tokens * top_k, size]"""
    return _multiply(
        x, pairs, weights.gate_up, weights.gate_up_bias, tile, weights.size, pairs.ids.shape[1],
        weights.activation, weights.limit, exact,
    )  # fmt: skip


def down(inner: Tensor, pairs: Pairs, weights: ExpertWeights, tile: Tile, *, exact: bool = False) -> Tensor:
    """inner [tokens * top_k, size] -> [tokens * top_k, hidden_size]"""
    return _multiply(inner, pairs, weights.down, weights.down_bias, tile, weights.hidden_size, 1, "none", 0.0, exact)


def _multiply(
    x: Tensor, pairs: Pairs, weight: Any, bias: Tensor | None, tile: Tile, num_out: int, divisor: int,
    activation: str, limit: float, exact: bool,
) -> Tensor:  # fmt: skip
    count, num_in = pairs.ids.numel(), weight.shape[1]
    y = torch.empty(count, num_out, dtype=x.dtype, device=x.device)
    assert x.is_contiguous()
    matrix, scales = stored(weight)
    is_sorted = pairs.counts is not None
    rows = tile.rows
    _experts[(triton.cdiv(num_out, tile.outputs), pairs.num_tiles(rows))](
        x, matrix, scales, x if bias is None else bias, y, pairs.ids, pairs.counts if is_sorted else pairs.ids,
        pairs.order if is_sorted else pairs.ids, count, pairs.num_experts, num_out, num_in, limit, DIVISOR=divisor,
        ROWS=rows, OUTPUTS=tile.outputs, INPUTS=tile.inputs,
        PAIRS=1 if is_sorted else triton.next_power_of_2(rows * pairs.ids.shape[1]),
        EXPERTS=triton.next_power_of_2(pairs.num_experts), IS_SORTED=is_sorted, BY_PAIR=pairs.by_pair,
        ACTIVATION=activation, HAS_BIAS=bias is not None,
        IS_EVEN=num_in % tile.inputs == 0 and num_out % tile.outputs == 0, IS_PACKED=weight.data is None,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=not exact, **pdl_options(),
    )  # fmt: skip
    return y


@triton.jit
def _add_outputs(
    outputs, factors, shared, shared_gate, y, size, TOP_K: tl.constexpr, HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < size
    total = tl.zeros([WIDTH], tl.float32)
    if HAS_SHARED:
        total = tl.load(shared + token * size + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_GATE:
            total *= tl.sigmoid(tl.load(shared_gate + token).to(tl.float32))
    for rank in tl.static_range(TOP_K):
        pair = token * TOP_K + rank
        part = tl.load(outputs + pair * size + columns, mask=inside, other=0.0).to(tl.float32)
        total += part * tl.load(factors + pair)
    tl.store(y + token * size + columns, total.to(y.dtype.element_ty), mask=inside)


def add_outputs(
    outputs: Tensor, factors: Tensor, shared: Tensor | None, shared_gate: Tensor | None, *, exact: bool = False
) -> Tensor:
    """outputs [tokens * top_k, hidden_size], factors [tokens, top_k] -> [tokens, hidden_size]"""
    tokens, top_k = factors.shape
    size = outputs.shape[1]
    y = torch.empty(tokens, size, dtype=outputs.dtype, device=outputs.device)
    width = min(1024, triton.next_power_of_2(size))
    assert shared is None or shared.is_contiguous()
    _add_outputs[(tokens, triton.cdiv(size, width))](
        outputs, factors, outputs if shared is None else shared, outputs if shared_gate is None else shared_gate, y,
        size, TOP_K=top_k, HAS_SHARED=shared is not None, HAS_GATE=shared_gate is not None, WIDTH=width, num_warps=4,
        enable_fp_fusion=not exact, **pdl_options(),
    )  # fmt: skip
    return y
