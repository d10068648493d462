"""Logits processors, one kernel each: penalties, and bitmasks of allowed tokens."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import sampling
from quire.kernels.cuda.launch.pdl import launch_dependents, pdl_options, wait_for_previous

WIDTH = 4096
WARPS = 8
IN_PROMPT = tl.constexpr(sampling.IN_PROMPT)


@triton.jit(do_not_specialize=["num_extra"])
def _penalize(
    logits, counts, index, penalties, logits_stride, counts_stride, size, num_extra,
    WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    wait_for_previous(PDL)
    nth = tl.program_id(0).to(tl.int64)
    index_row = index + nth * (2 + num_extra)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < size
    count = tl.load(counts + tl.load(index_row + 1) * counts_stride + columns, mask=inside, other=0)
    for nth_extra in range(num_extra):
        count += (columns == tl.load(index_row + 2 + nth_extra)).to(tl.int32)
    logit_ptrs = logits + tl.load(index_row) * logits_stride + columns
    value = tl.load(logit_ptrs, mask=inside, other=0.0)
    repetition = tl.load(penalties + nth * 3)
    value = tl.where(count > 0, tl.where(value > 0, value / repetition, value * repetition), value)
    in_output = count & (IN_PROMPT - 1)
    frequency, presence = tl.load(penalties + nth * 3 + 1), tl.load(penalties + nth * 3 + 2)
    value -= frequency * in_output + presence * (in_output > 0).to(tl.float32)
    tl.store(logit_ptrs, value, mask=inside)


def penalize(logits: Tensor, counts: Tensor, index: Tensor, penalties: Tensor) -> None:
    size = logits.shape[1]
    assert logits.stride(1) == counts.stride(1) == 1
    _penalize[(len(index), triton.cdiv(size, WIDTH))](
        logits, counts, index, penalties, logits.stride(0), counts.stride(0), size, index.shape[1] - 2, WIDTH=WIDTH,
        num_warps=WARPS, **pdl_options(),
    )  # fmt: skip


@triton.jit
def _apply_token_bitmask(logits, rows, bits, logits_stride, num_bytes, size, WIDTH: tl.constexpr, PDL: tl.constexpr):
    launch_dependents(PDL)
    wait_for_previous(PDL)
    nth = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    byte = tl.load(bits + nth * num_bytes + columns // 8, mask=columns // 8 < num_bytes, other=0).to(tl.int32)
    is_banned = ((byte >> (columns % 8)) & 1) == 0
    logit_ptrs = logits + tl.load(rows + nth) * logits_stride + columns
    tl.store(logit_ptrs, float("-inf"), mask=is_banned & (columns < size))


def apply_token_bitmask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    size = logits.shape[1]
    assert logits.stride(1) == 1
    _apply_token_bitmask[(len(rows), triton.cdiv(size, WIDTH))](
        logits, rows, bits, logits.stride(0), bits.shape[1], size, WIDTH=WIDTH, num_warps=WARPS, **pdl_options()
    )
