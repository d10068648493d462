"""RotaryTable: cosines and sines for every position, and the scaling rules for longer contexts.

All is computed in float32, in the order that transformers uses: models were trained with those numbers.
`models/rope.py` picks the rule of a configuration; the `rope` op applies the table.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class RotaryTable:
    """`table` [max_len, dim] float32: dim / 2 cosines, then dim / 2 sines, for each position, times `magnitude`."""

    def __init__(
        self, frequencies: Tensor, *, max_len: int, interleaved: bool, device: torch.device, magnitude: float = 1.0
    ) -> None:
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), frequencies)
        self.table = (torch.cat((angles.cos(), angles.sin()), dim=-1) * magnitude).to(device)
        self.interleaved = interleaved


def plain_frequencies(dim: int, theta: float) -> Tensor:
    """Radians a token, [dim / 2]: from one for the first pair of dimensions down to nearly 1 / theta."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def stretch_llama3(
    plain: Tensor, *, factor: float, original_max_len: int, low_freq_factor: float, high_freq_factor: float
) -> Tensor:
    """Frequencies below low_freq_factor turns a context are divided by `factor`; those above high_freq_factor stay."""
    turns = original_max_len * plain / (2 * math.pi)
    return _blend(plain, plain / factor, (turns - low_freq_factor) / (high_freq_factor - low_freq_factor))


def stretch_yarn(
    plain: Tensor,
    *,
    theta: float,
    factor: float,
    original_max_len: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> Tensor:
    """As llama3, with a linear blend over the dimensions between beta_fast and beta_slow turns a context."""
    dim = 2 * len(plain)

    def dimension(turns: float) -> float:
        return dim * math.log(original_max_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    return _blend(plain, plain / factor, 1 - (torch.arange(dim // 2, dtype=torch.float32) - low) / width)


def yarn_magnitude(factor: float) -> float:
    """YaRN's attention factor: the scale of queries and keys for a context stretched by `factor`."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def _blend(kept: Tensor, stretched: Tensor, share: Tensor) -> Tensor:
    share = share.clamp(0, 1)
    return kept * share + stretched * (1 - share)
