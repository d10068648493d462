"""Scoring: the options of attention scores. All attention kernels take them."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Scoring(NamedTuple):
    """The options of `reference.attention`."""

    scale: float
    window: int | None
    slopes: Tensor | None
    softcap: float | None
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether scores are only scaled and masked."""
        return self.slopes is None and self.softcap is None and self.sinks is None


@triton.jit
def softcap_scores(scores, cap):
    """cap * tanh(scores / cap)"""
    return cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)
