"""RotaryTable: cosines and sines for every position, and the scaling rules for longer contexts.

Angles are computed in float32, in the order that transformers uses: models were trained with those numbers. Cosines and
sines are rounded once, from float64, so that they are the same on every machine.
`models/rope.py` picks the rule of a configuration; the `rope` op applies the table.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.kernels.arrays import Array, Arrays

Floats = NDArray[np.float32]

SLICE = 1024  # positions whose angles are computed at once


class RotaryTable:
    """`table` [max_len, dim] float32: dim / 2 cosines, then dim / 2 sines, for each position, times `magnitude`."""

    def __init__(
        self, frequencies: Floats, *, max_len: int, interleaved: bool, arrays: Arrays, magnitude: float = 1.0
    ) -> None:
        half = len(frequencies)
        table = np.empty((max_len, 2 * half), np.float32)
        for first in range(0, max_len, SLICE):  # in float64 a whole table would take four times its memory
            part = table[first : first + SLICE]
            angles = np.outer(np.arange(first, first + len(part), dtype=np.float32), frequencies).astype(np.float64)
            part[:, :half], part[:, half:] = np.cos(angles), np.sin(angles)
        table *= np.float32(magnitude)
        self.table: Array = arrays.put(table, "float32")
        self.interleaved = interleaved


def plain_frequencies(dim: int, theta: float) -> Floats:
    """Radians a token, [dim / 2]: from one for the first pair of dimensions down to nearly 1 / theta."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    powers = (float(theta) ** exponents.astype(np.float64)).astype(np.float32)  # rounded once
    return np.float32(1.0) / powers


def stretch_llama3(
    plain: Floats, *, factor: float, original_max_len: int, low_freq_factor: float, high_freq_factor: float
) -> Floats:
    """Frequencies below low_freq_factor turns a context are divided by `factor`; those above high_freq_factor stay."""
    turns = np.float32(original_max_len) * plain / np.float32(2 * math.pi)
    share = (turns - np.float32(low_freq_factor)) / np.float32(high_freq_factor - low_freq_factor)
    return _blend(plain, plain / np.float32(factor), share)


def stretch_yarn(
    plain: Floats,
    *,
    theta: float,
    factor: float,
    original_max_len: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> Floats:
    """As llama3, with a linear blend over the dimensions between beta_fast and beta_slow turns a context."""
    dim = 2 * len(plain)

    def dimension(turns: float) -> float:
        return dim * math.log(original_max_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    share = 1 - (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width)
    return _blend(plain, plain / np.float32(factor), share)


def yarn_magnitude(factor: float) -> float:
    """YaRN's attention factor: the scale of queries and keys for a context stretched by `factor`."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def longrope_magnitude(factor: float, original_max_len: int) -> float:
    """LongRoPE's attention factor, for a context `factor` times as long as the original."""
    return math.sqrt(1 + math.log(factor) / math.log(original_max_len)) if factor > 1 else 1.0


def _blend(kept: Floats, stretched: Floats, share: NDArray[Any]) -> Floats:
    share = np.clip(share, np.float32(0), np.float32(1))
    blended: Floats = kept * share + stretched * (1 - share)
    return blended
