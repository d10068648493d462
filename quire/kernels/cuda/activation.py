"""Activations on the GPU, gated and plain."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cuda.launch.pdl import launch_dependents, pdl_options, wait_for_previous

WIDTH = 1024


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def gelu(x):
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x * tl.sigmoid(2.0 * inner)  # 0.5 * (1 + tanh(inner)) is sigmoid(2 * inner)


@triton.jit
def _activate(x, y, count, ACTIVATION: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr):
    launch_dependents(PDL)
    wait_for_previous(PDL)
    offsets = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    value = tl.load(x + offsets, mask=offsets < count, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        value = silu(value)
    elif ACTIVATION == "gelu_tanh":
        value = gelu(value)
    elif ACTIVATION == "gelu":
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    else:
        value = tl.where(value < 0.0, 0.0, value)
    tl.store(y + offsets, value.to(y.dtype.element_ty), mask=offsets < count)


def activate(x: Tensor, activation: str) -> Tensor:
    assert activation in ("gelu", "gelu_tanh", "relu", "silu"), activation
    assert x.is_contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    count = x.numel()
    if count:
        _activate[(triton.cdiv(count, WIDTH),)](
            x, y, count, ACTIVATION=activation, WIDTH=WIDTH, num_warps=4, **pdl_options()
        )  # fmt: skip
    return y


@triton.jit
def _gate(x, y, size, IS_SILU: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr):
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < size
    gate = tl.load(x + row * 2 * size + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * size + size + columns, mask=inside, other=0.0).to(tl.float32)
    value = (silu(gate) if IS_SILU else gelu(gate)) * up
    tl.store(y + row * size + columns, value.to(y.dtype.element_ty), mask=inside)


def _launch(gate_up: Tensor, is_silu: bool) -> Tensor:
    assert gate_up.is_contiguous()
    size = gate_up.shape[-1] // 2
    y = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    rows = gate_up.numel() // (2 * size)
    if rows:
        _gate[(rows, triton.cdiv(size, WIDTH))](
            gate_up, y, size, IS_SILU=is_silu, WIDTH=WIDTH, num_warps=4, **pdl_options()
        )
    return y


def silu_mul(gate_up: Tensor) -> Tensor:
    return _launch(gate_up, True)


def gelu_mul(gate_up: Tensor) -> Tensor:
    return _launch(gate_up, False)
