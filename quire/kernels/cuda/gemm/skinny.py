"""Skinny matmuls, of up to 64 rows. They are bound by the read of the weights; cuBLAS is slower for small matrices.

One row is a GEMV without tensor cores. More rows use tensor cores, with the weights as the left operand, which has
more rows. `linear` and `gated_linear` choose the kernel, and use cuBLAS where it is as fast. Tile sizes were measured
on an H200 in whole layers, because PDL overlaps consecutive kernels.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from quire.kernels.cuda.activation import gelu, gelu_mul, silu, silu_mul
from quire.kernels.cuda.launch.pdl import launch_dependents, pdl_options, wait_for_previous

OUTPUTS, INPUTS = 2, 2048  # of a GEMV tile: the fastest of the sizes tried, for all matrices of a model
MIN_ROWS, MAX_ROWS = 16, 64
PROGRAMS = 132  # multiprocessors of an H200: cuBLAS is as fast for matrices with more tiles
MAX_SPLITS = 4
HALVES = (torch.bfloat16, torch.float16)


@triton.jit
def _gemv(
    x, weight, y, num_out, num_in, stride, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = weight + outputs.to(tl.int64)[:, None] * stride
    is_output = (outputs < num_out)[:, None]
    inputs = tl.arange(0, INPUTS)
    first = tl.load(rows + inputs[None, :], mask=is_output & (inputs < num_in)[None, :], other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    total = first * tl.load(x + inputs, mask=inputs < num_in, other=0.0).to(tl.float32)[None, :]
    for start in range(INPUTS, num_in, INPUTS):
        in_range = start + inputs < num_in
        x_tile = tl.load(x + start + inputs, mask=in_range, other=0.0).to(tl.float32)[None, :]
        total += (
            tl.load(rows + start + inputs[None, :], mask=is_output & in_range[None, :], other=0.0).to(tl.float32)
            * x_tile
        )
    tl.store(y + outputs, tl.sum(total, axis=1).to(y.dtype.element_ty), mask=outputs < num_out)


@triton.jit(do_not_specialize=["num_rows"])  # one compilation for all numbers of rows that pad to the same tile
def _skinny(
    x, weight, y, partials, arrived, num_rows, num_out, num_in, x_row, stride, to_second, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, SPLITS: tl.constexpr, IS_GATED: tl.constexpr, IS_SILU: tl.constexpr,
    IS_EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    tile, split = tl.program_id(1), tl.program_id(2)
    outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    rows, inputs = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, INPUTS)
    weights = weight + outputs.to(tl.int64)[:, None] * stride + inputs[None, :]
    second = weights + to_second
    values = x + rows.to(tl.int64)[None, :] * x_row + inputs[:, None]
    is_row = (rows < num_rows)[None, :]
    is_output = (outputs < num_out)[:, None]
    share = tl.cdiv(num_in, SPLITS * INPUTS) * INPUTS
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    total_up = tl.zeros([OUTPUTS, ROWS], tl.float32)
    wait_for_previous(PDL)
    for start in range(split * share, tl.minimum(split * share + share, num_in), INPUTS):
        in_range = start + inputs < num_in
        mask = is_output & in_range[None, :]
        x_tile = tl.load(values + start, mask=is_row if IS_EVEN else is_row & in_range[:, None], other=0.0)
        w_tile = tl.load(weights + start) if IS_EVEN else tl.load(weights + start, mask=mask, other=0.0)
        total = tl.dot(w_tile, x_tile, total, input_precision="ieee")
        if IS_GATED:
            w_tile = tl.load(second + start) if IS_EVEN else tl.load(second + start, mask=mask, other=0.0)
            total_up = tl.dot(w_tile, x_tile, total_up, input_precision="ieee")
    if IS_GATED:
        gate = total.to(y.dtype.element_ty).to(tl.float32)
        up = total_up.to(y.dtype.element_ty).to(tl.float32)
        total = (silu(gate) if IS_SILU else gelu(gate)) * up
    y_ptrs = y + rows[None, :].to(tl.int64) * num_out + outputs[:, None]
    if SPLITS == 1:
        tl.store(y_ptrs, total.to(y.dtype.element_ty), mask=is_row & is_output)
    else:
        offsets = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        tl.store(partials + (tile * SPLITS + split) * OUTPUTS * ROWS + offsets, total)
        tl.debug_barrier()
        before = tl.atomic_add(arrived + tile, 1, sem="acq_rel")
        if before == SPLITS - 1:
            total = tl.zeros([OUTPUTS, ROWS], tl.float32)
            for other in tl.static_range(SPLITS):
                partial_ptrs = partials + (tile * SPLITS + other) * OUTPUTS * ROWS + offsets
                total += tl.load(partial_ptrs, cache_modifier=".cg")
            tl.store(y_ptrs, total.to(y.dtype.element_ty), mask=is_row & is_output)
            tl.store(arrived + tile, 0)


class Tile(NamedTuple):
    """The tile of a program. With split-K, `splits` programs share the inputs, and the last to end adds their sums."""

    outputs: int
    inputs: int
    warps: int
    stages: int
    splits: int = 1
    max_rows: int = MAX_ROWS


TILE_OUTPUTS = 64


@cache
def workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """Partial sums and counters of split tiles, for all matmuls. It never grows or moves: graphs point to it."""
    partials = torch.empty(PROGRAMS * TILE_OUTPUTS * MAX_ROWS, dtype=torch.float32, device=device)
    return partials, torch.zeros(PROGRAMS, dtype=torch.int32, device=device)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in], weight [out, in] -> x W^T"""
    num_rows = x.numel() // weight.shape[1]
    if num_rows == 1 and _is_plain(x, weight):
        return _one_row(x, weight)
    num_tiles = triton.cdiv(weight.shape[0], TILE_OUTPUTS)
    if _are_few(num_rows, x, weight) and num_tiles <= PROGRAMS:
        splits = min(MAX_SPLITS, PROGRAMS // num_tiles)
        return multiply(x, weight, Tile(TILE_OUTPUTS, 128, 4, 6 if num_rows <= 32 else 5, splits))
    return functional.linear(x, weight)


def gated_linear(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    """x [..., in], weight [2 * size, in], the gate's rows first -> silu_mul or gelu_mul of x W^T, [..., size]"""
    num_rows = x.numel() // weight.shape[1]
    if _are_few(num_rows, x, weight):
        tile = Tile(TILE_OUTPUTS, 128, 4, 4) if num_rows <= 16 else Tile(TILE_OUTPUTS, 64, 4, 6)
        return multiply(x, weight, tile, activation)
    return (silu_mul if activation == "silu" else gelu_mul)(linear(x, weight))


def _are_few(num_rows: int, x: Tensor, weight: Tensor) -> bool:
    return 1 < num_rows <= MAX_ROWS and x.dtype in HALVES and _is_plain(x, weight)


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    return weight.stride(1) == 1 and x.dtype == weight.dtype and x.is_contiguous()


def _one_row(x: Tensor, weight: Tensor) -> Tensor:
    y = torch.empty(*x.shape[:-1], weight.shape[0], dtype=x.dtype, device=x.device)
    _gemv[(triton.cdiv(weight.shape[0], OUTPUTS),)](
        x, weight, y, *weight.shape, weight.stride(0), OUTPUTS=OUTPUTS, INPUTS=INPUTS, num_warps=2, **pdl_options()
    )
    return y


def multiply(x: Tensor, weight: Tensor, tile: Tile, activation: str | None = None) -> Tensor:
    """x W^T by tiles. With an activation, the rows of W are gate and up, and the result is activation(gate) * up."""
    num_in = weight.shape[1]
    num_rows, num_out = x.numel() // num_in, weight.shape[0] // 2 if activation else weight.shape[0]
    y = torch.empty(*x.shape[:-1], num_out, dtype=x.dtype, device=x.device)
    partials, arrived = workspace(x.device)
    rows = min(tile.max_rows, max(MIN_ROWS, triton.next_power_of_2(num_rows)))
    assert tile.splits == 1 or num_rows <= rows, "the workspace has room for one tile of rows"
    _skinny[(triton.cdiv(num_rows, rows), triton.cdiv(num_out, tile.outputs), tile.splits)](
        x, weight, y, partials, arrived, num_rows, num_out, num_in, num_in, weight.stride(0),
        num_out * weight.stride(0), ROWS=rows,
        OUTPUTS=tile.outputs, INPUTS=tile.inputs, SPLITS=tile.splits, IS_GATED=activation is not None,
        IS_SILU=activation == "silu", IS_EVEN=num_in % tile.inputs == 0 and num_out % tile.outputs == 0,
        num_warps=tile.warps, num_stages=tile.stages, **pdl_options(),
    )  # fmt: skip
    return y
