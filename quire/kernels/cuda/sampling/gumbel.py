"""Gumbel noise for token ids in a kernel. Words equal those of `quire.kernels.philox`; noise may differ by rounding."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels import philox

NUM_WORDS = tl.constexpr(philox.NUM_WORDS)
LANES = tl.constexpr(philox.LANES)


@triton.jit
def token_words(seed, length, tile, WIDTH: tl.constexpr):
    """seed and length int64 -> random words of the ids of a tile, [WIDTH] uint32; WIDTH is a multiple of 64."""
    counters = tile * (WIDTH // NUM_WORDS) + tl.arange(0, WIDTH // NUM_WORDS)
    low, high = length.to(tl.uint32), (length >> 32).to(tl.uint32)
    zeros = tl.zeros_like(counters).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, zeros + low, zeros + high, counters.to(tl.uint32), zeros)
    words = tl.join(tl.join(w0, w1), tl.join(w2, w3))  # [counters, low bit of the word's number, high bit]
    words = tl.reshape(words, [WIDTH // (NUM_WORDS * LANES), LANES, 2, 2])
    return tl.reshape(tl.permute(words, [0, 3, 2, 1]), [WIDTH])


@triton.jit
def gumbel(seed, length, tile, WIDTH: tl.constexpr):
    """Standard Gumbel noise of the ids of a tile, [WIDTH] float32."""
    uniform = token_words(seed, length, tile, WIDTH).to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    uniform = tl.minimum(uniform, 0.99999994)
    rest = 1.0 - uniform
    rounded = 1.0 - rest  # u after rounding of 1 - u: log(1 - u) * u / rounded corrects for it
    exponential = tl.where(rounded > 0.0, -tl.log(rest) * (uniform / tl.where(rounded > 0.0, rounded, 1.0)), uniform)
    return -tl.log(exponential)
