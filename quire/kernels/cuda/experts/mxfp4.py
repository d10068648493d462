"""Codes of `quant/mxfp4_codes.py` as numbers, in registers."""

from __future__ import annotations

import triton
import triton.language as tl

# The bits of a code, moved to those of a float32, are its value times 2^-126: also for the code of 0.5, a subnormal
# number. So a scale's exponent is larger by 126, and its bias is 1.


@triton.jit
def unpack_low(codes, scales, TYPE: tl.constexpr):
    """The values of the low halves of bytes, times their scales; both are of one shape, or broadcast."""
    wide = codes.to(tl.int32)
    value = (((wide << 28) & -0x80000000) | ((wide & 7) << 22)).to(tl.float32, bitcast=True)
    return (value * ((scales.to(tl.int32) + 126) << 23).to(tl.float32, bitcast=True)).to(TYPE)


@triton.jit
def unpack_high(codes, scales, TYPE: tl.constexpr):
    wide = codes.to(tl.int32)
    value = (((wide << 24) & -0x80000000) | ((wide & 0x70) << 18)).to(tl.float32, bitcast=True)
    return (value * ((scales.to(tl.int32) + 126) << 23).to(tl.float32, bitcast=True)).to(TYPE)


@triton.jit
def unpack_chunk(codes, scales, ROWS: tl.constexpr, TYPE: tl.constexpr):
    """A chunk of rows: codes [ROWS, 64] and scales [ROWS, 4] -> the columns of the low halves, and of the high ones."""
    low, high = tl.split(tl.reshape(scales, [ROWS, 2, 2]))
    low = tl.reshape(tl.broadcast_to(low[:, :, None], [ROWS, 2, 32]), [ROWS, 64])
    high = tl.reshape(tl.broadcast_to(high[:, :, None], [ROWS, 2, 32]), [ROWS, 64])
    return unpack_low(codes, low, TYPE), unpack_high(codes, high, TYPE)
