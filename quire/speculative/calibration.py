"""Calibration: from the odds that a proposer gives to the measured chance that a draft is right.

A proposer may be wrong about its own odds, or lie. So they only select a bin, and each bin counts what happened.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

NUM_BINS = 12
PRIOR_DRAFTS = 6.0  # how many drafts a bin must have seen to outweigh the proposer's own odds
MAX_DRAFTS = 2000.0  # of a bin; older ones are forgotten
MIN_CHANCE, MAX_CHANCE = 0.001, 0.999
LEARNING_RATE = 0.15  # of a request's own shift
MAX_SHIFT = 2.0


@dataclass(slots=True)
class Bin:
    num_drafts: float = 0.0
    num_right: float = 0.0

    def chance(self, odds: float) -> float:
        return (self.num_right + PRIOR_DRAFTS * odds) / (self.num_drafts + PRIOR_DRAFTS)

    def learn(self, right: bool) -> None:
        if self.num_drafts >= MAX_DRAFTS:
            self.num_drafts /= 2
            self.num_right /= 2
        self.num_drafts += 1.0
        self.num_right += right


@dataclass(slots=True)
class Calibration:
    """The bins of all proposers, by their names."""

    _bins: dict[str, list[Bin]] = field(default_factory=dict)

    def chance(self, source: str, odds: float, shift: float = 0.0) -> float:
        """The chance that a draft is right if its parent is. `shift` is that of the request, in log-odds."""
        odds = clamp(odds)
        found = clamp(self._bin(source, odds).chance(odds))
        return found if not shift else sigmoid(logit(found) + shift)

    def learn(self, source: str, odds: float, right: bool, shift: float = 0.0) -> float:
        """Record a draft whose parent was right. Returns the request's new shift."""
        odds = clamp(odds)
        error = right - self.chance(source, odds, shift)
        self._bin(source, odds).learn(right)
        return max(-MAX_SHIFT, min(MAX_SHIFT, shift + LEARNING_RATE * error))

    def _bin(self, source: str, odds: float) -> Bin:
        bins = self._bins.get(source)
        if bins is None:
            bins = self._bins[source] = [Bin() for _ in range(NUM_BINS)]
        return bins[max(0, min(NUM_BINS - 1, int(1.5 * logit(odds) + NUM_BINS / 2)))]


def clamp(chance: float) -> float:
    """NaN becomes the smallest chance."""
    return min(MAX_CHANCE, max(MIN_CHANCE, chance)) if chance == chance else MIN_CHANCE


def logit(chance: float) -> float:
    return math.log(chance / (1.0 - chance))


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))
