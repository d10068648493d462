"""RMSNorm and LayerNorm on the GPU, with an optional residual: one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cuda.launch.pdl import launch_dependents, pdl_options, wait_for_previous


@triton.jit
def _norm(
    x, residual, weight, bias, y, total, groups, x_row, x_group, size, eps, HAS_RESIDUAL: tl.constexpr,
    CENTERED: tl.constexpr, HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    inside = columns < size
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    values = tl.load(x + row // groups * x_row + row % groups * x_group + columns, mask=inside, other=0.0).to(
        tl.float32
    )
    if HAS_RESIDUAL:
        values += tl.load(residual + row * size + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row * size + columns, rounded, mask=inside)
        values = rounded.to(tl.float32)
    if CENTERED:
        values = tl.where(inside, values - tl.sum(values, axis=0) / size, 0.0)
    factor = tl.rsqrt(tl.sum(values * values, axis=0) / size + eps)
    normed = values * factor * scale
    if HAS_BIAS:
        normed += shift
    tl.store(y + row * size + columns, normed.to(y.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """As in the reference; the sum is written into `residual`."""
    return _launch(x, weight, None, eps, residual, centered=False)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """As in the reference; the sum is written into `residual`."""
    return _launch(x, weight, bias, eps, residual, centered=True)


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None, *, centered: bool
) -> Tensor | tuple[Tensor, Tensor]:
    size = x.shape[-1]
    rows = x if x.dim() == 3 else x.unsqueeze(1)
    assert rows.stride(-1) == 1
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = residual if residual is not None else y
    assert total.is_contiguous()
    width = triton.next_power_of_2(size)
    count = rows.shape[0] * rows.shape[1]
    if count:
        _norm[(count,)](
            rows, total, weight, weight if bias is None else bias, y, total, rows.shape[1], rows.stride(0),
            rows.stride(1), size, eps, HAS_RESIDUAL=residual is not None, CENTERED=centered, HAS_BIAS=bias is not None,
            WIDTH=width, num_warps=min(16, max(1, width // 512)), **pdl_options(),
        )  # fmt: skip
    return y if residual is None else (y, residual)
