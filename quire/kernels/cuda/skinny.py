"""Products of one row: a matrix is read once, at the speed of memory, which cuBLAS does not reach for small ones."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from quire.kernels.cuda.chain import after_last, chained, let_next

OUTPUTS, INPUTS = 2, 2048  # of a tile: the fastest of the sizes tried, for all of a model's matrices


@triton.jit
def _gemv(
    x, weight, y, num_out, num_in, stride, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    let_next(CHAINED)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = weight + outputs.to(tl.int64)[:, None] * stride
    is_output = (outputs < num_out)[:, None]
    inputs = tl.arange(0, INPUTS)
    first = tl.load(rows + inputs[None, :], mask=is_output & (inputs < num_in)[None, :], other=0.0).to(tl.float32)
    after_last(CHAINED)
    total = first * tl.load(x + inputs, mask=inputs < num_in, other=0.0).to(tl.float32)[None, :]
    for at in range(INPUTS, num_in, INPUTS):
        there = at + inputs < num_in
        own = tl.load(x + at + inputs, mask=there, other=0.0).to(tl.float32)[None, :]
        total += tl.load(rows + at + inputs[None, :], mask=is_output & there[None, :], other=0.0).to(tl.float32) * own
    tl.store(y + outputs, tl.sum(total, axis=1).to(y.dtype.element_ty), mask=outputs < num_out)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in], weight [out, in] -> x W^T"""
    if x.numel() != weight.shape[1] or weight.stride(1) != 1 or x.dtype != weight.dtype or not x.is_contiguous():
        return functional.linear(x, weight)
    y = torch.empty(*x.shape[:-1], weight.shape[0], dtype=x.dtype, device=x.device)
    _gemv[(triton.cdiv(weight.shape[0], OUTPUTS),)](
        x, weight, y, *weight.shape, weight.stride(0), OUTPUTS=OUTPUTS, INPUTS=INPUTS, num_warps=2, **chained()
    )
    return y
