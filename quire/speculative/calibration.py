"""Calibration: from the odds that a proposer gives to the measured chance that a draft is right.

A proposer may be wrong about its own odds, or lie. So they only select a bin, and each bin counts what happened.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

CENTERS = (0.02, 0.05, 0.1, 0.18, 0.28, 0.4, 0.52, 0.64, 0.75, 0.84, 0.91, 0.96, 0.99)  # of the bins
EDGES = tuple((low + high) / 2 for low, high in pairwise(CENTERS))
PRIOR_DRAFTS = 6.0  # how many drafts a bin must have seen to outweigh the proposer's own odds
MAX_DRAFTS = 2000.0  # of a bin; older ones are forgotten
LEARNING_RATE = 0.15  # of a request's own shift
MAX_SHIFT = 2.0


@dataclass(slots=True)
class Bin:
    """Drafts of about the same odds."""

    num_drafts: float
    num_right: float
    log_odds: float  # of being right

    @classmethod
    def of(cls, center: float) -> Bin:
        return cls(PRIOR_DRAFTS, PRIOR_DRAFTS * center, math.log(center / (1.0 - center)))

    def learn(self, right: bool) -> None:
        if self.num_drafts >= MAX_DRAFTS:
            self.num_drafts /= 2
            self.num_right /= 2
        self.num_drafts += 1.0
        self.num_right += right
        self.log_odds = math.log((self.num_right + 0.01) / (self.num_drafts - self.num_right + 0.01))


@dataclass(slots=True)
class Calibration:
    """The bins of all proposers, by their names."""

    _bins: dict[str, list[Bin]] = field(default_factory=dict)

    def chances(self, source: str, odds: Sequence[float], shift: float = 0.0) -> list[float]:
        """The chance of each draft to be right if its parent is. `shift` is that of the request, in log-odds."""
        bins = self._find(source)
        if odds and odds.count(odds[0]) == len(odds):  # of a device: it has one estimate for all
            return [1.0 / (1.0 + math.exp(-bins[bin_of(odds[0])].log_odds - shift))] * len(odds)
        return [1.0 / (1.0 + math.exp(-bins[bin_of(each)].log_odds - shift)) for each in odds]

    def learn(self, source: str, odds: float, right: bool, shift: float = 0.0) -> float:
        """Record a draft whose parent was right. Returns the request's new shift."""
        found = self._find(source)[bin_of(odds)]
        error = right - 1.0 / (1.0 + math.exp(-found.log_odds - shift))
        found.learn(right)
        return max(-MAX_SHIFT, min(MAX_SHIFT, shift + LEARNING_RATE * error))

    def _find(self, source: str) -> list[Bin]:
        bins = self._bins.get(source)
        if bins is None:
            bins = self._bins[source] = [Bin.of(center) for center in CENTERS]
        return bins


def bin_of(odds: float) -> int:
    """NaN is in the first bin."""
    return bisect_right(EDGES, odds) if odds == odds else 0
