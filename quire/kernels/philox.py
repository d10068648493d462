"""Philox4x32-10: random numbers as a function of (key, counter), with no state to share, save or restore.

Written in int64 tensors whose values stay below 2**32, so that every device gives the same bits. `reference` re-exports
`philox_uniform` as an op; the sampler is its caller.
"""

from __future__ import annotations

from torch import Tensor

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four 32-bit words out of a counter of four and a key of two; each is an int64 tensor [n] of values < 2**32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3


def philox_uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """seeds [n] int64, positions [n] int64 -> [n] float64 in [0, 1): the draw of each seed at each position.

    The seed's 64 bits are the key and the position is the counter; the draw is made of the first 53 bits that come out.
    """
    zero = positions.new_zeros(())
    counter = (positions & WORD, (positions >> 32) & WORD, zero, zero)
    first, second, _, _ = philox(counter, (seeds & WORD, (seeds >> 32) & WORD))
    return ((first >> 5).double() * 2.0**26 + (second >> 6).double()) * 2.0**-53


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low word of the 64-bit product. int64 wraps where uint64 does not; the bits are the same."""
    product = word * factor
    return (product >> 32) & WORD, product & WORD
