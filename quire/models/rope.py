"""Builds the RotaryTable of a configuration's `Rope`. The models call it."""

from __future__ import annotations

import numpy as np

from quire.kernels.arrays import Arrays
from quire.layers.rotary import (
    Floats,
    RotaryTable,
    longrope_magnitude,
    plain_frequencies,
    stretch_llama3,
    stretch_yarn,
    yarn_magnitude,
)
from quire.models.config import Rope, RopeScaling


def rotary_table(rope: Rope, max_len: int, arrays: Arrays) -> RotaryTable:
    return RotaryTable(
        frequencies(rope, max_len),
        max_len=max_len,
        interleaved=rope.interleaved,
        arrays=arrays,
        magnitude=magnitude(rope.scaling),
    )


def frequencies(rope: Rope, max_len: int = 0) -> Floats:
    """Radians a token, [dim / 2]. Only longrope depends on the longest context."""
    plain = plain_frequencies(rope.dim, rope.theta)
    if rope.scaling is not None and rope.scaling.kind == "longrope":
        is_long = max_len > rope.scaling.original_max_len
        divisors = rope.scaling.long_divisors if is_long else rope.scaling.short_divisors
        return np.divide(plain, np.array(divisors, np.float32))
    if rope.divisors is not None:
        plain = np.divide(plain, np.array(rope.divisors, np.float32))
    return plain if rope.scaling is None else _stretch(plain, rope.theta, rope.scaling)


def magnitude(scaling: RopeScaling | None) -> float:
    if scaling is None or scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.kind == "longrope" and scaling.attention_factor is None:
        return longrope_magnitude(scaling.factor, scaling.original_max_len)
    return yarn_magnitude(scaling.factor) if scaling.attention_factor is None else scaling.attention_factor


def _stretch(plain: Floats, theta: float, scaling: RopeScaling) -> Floats:
    if scaling.kind == "linear":
        return plain / np.float32(scaling.factor)
    if scaling.kind == "llama3":
        return stretch_llama3(
            plain,
            factor=scaling.factor,
            original_max_len=scaling.original_max_len,
            low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor,
        )
    return stretch_yarn(
        plain,
        theta=theta,
        factor=scaling.factor,
        original_max_len=scaling.original_max_len,
        beta_fast=scaling.beta_fast,
        beta_slow=scaling.beta_slow,
        truncate=scaling.truncate,
    )
