"""Philox4x32-10 inside a kernel: the same draw for (seed, position) as `quire.kernels.philox`, bit for bit."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels import philox

WORD = tl.constexpr(philox.WORD)
FIRST_MULTIPLIER = tl.constexpr(philox.MULTIPLIERS[0])
SECOND_MULTIPLIER = tl.constexpr(philox.MULTIPLIERS[1])
FIRST_STEP = tl.constexpr(philox.KEY_STEPS[0])
SECOND_STEP = tl.constexpr(philox.KEY_STEPS[1])
ROUNDS = tl.constexpr(philox.ROUNDS)


@triton.jit
def draw_uniform(seed, position):
    """seed and position int64 -> float64 in [0, 1). Words are int64 below 2**32; products wrap to the right bits."""
    c0 = position & WORD
    c1 = (position >> 32) & WORD
    c2 = position * 0
    c3 = position * 0
    k0 = seed & WORD
    k1 = (seed >> 32) & WORD
    for _ in tl.static_range(ROUNDS):
        product0 = c0 * FIRST_MULTIPLIER
        product1 = c2 * SECOND_MULTIPLIER
        c0 = ((product1 >> 32) & WORD) ^ c1 ^ k0
        c1 = product1 & WORD
        c2 = ((product0 >> 32) & WORD) ^ c3 ^ k1
        c3 = product0 & WORD
        k0 = (k0 + FIRST_STEP) & WORD
        k1 = (k1 + SECOND_STEP) & WORD
    return ((c0 >> 5).to(tl.float64) * 67108864.0 + (c1 >> 6).to(tl.float64)) * 1.1102230246251565e-16
