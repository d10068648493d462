"""Asking: whether a model is asked for drafts, and for how many. Its time is spent before its drafts are known.

So the decision uses how often its drafts for this request were right so far. A model that does not pay is asked again
later (`back_off.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.speculative.back_off import BackOff

FIRST_RATE = 0.7  # of right drafts, before any was verified
RATE_WEIGHT = 0.1
MAX_DEPTH = 8
TIME_WEIGHT = 0.2
MIN_GAIN = 1.02


@dataclass(slots=True)
class Asked:
    """A request's experience with a model."""

    rate: float = FIRST_RATE  # of drafts that were right, if their parents were
    back_off: BackOff = field(default_factory=BackOff)

    def learn(self, right: bool) -> None:
        self.rate += RATE_WEIGHT * (right - self.rate)
        if right:
            self.back_off.reset()


@dataclass(slots=True)
class DraftTimes:
    """The measured seconds of one pass of a model, by the number of rows."""

    _seconds: dict[int, float] = field(default_factory=dict)

    def learn(self, num_rows: int, num_passes: int, seconds: float) -> None:
        each_s, known = seconds / num_passes, self._seconds.get(num_rows)
        self._seconds[num_rows] = each_s if known is None else known + TIME_WEIGHT * (min(each_s, 2 * known) - known)

    def expect(self, num_rows: int) -> float:
        """0 if nothing is known."""
        if not self._seconds:
            return 0.0
        nearest = min(self._seconds, key=lambda each: abs(each - num_rows))
        return self._seconds[nearest]


def choose_depth(
    asked: Asked, ratios: Sequence[float], pass_share: float, num_rows: int, others: float, is_parallel: bool = False
) -> int:
    """How many drafts in a row to ask for, 0 included.

    `ratios` are durations of steps by drafts, and `pass_share` that of one pass of the model, relative to a plain step.
    A model that is parallel makes all drafts in one pass. `others` is the rate of tokens, relative to plain steps, that
    drafts without the model promise.
    """
    best, best_rate, expected, survival = 0, max(MIN_GAIN, others), 1.0, 1.0
    for depth in range(1, min(MAX_DEPTH, len(ratios) - 1) + 1):
        survival *= asked.rate
        expected += survival
        ratio = 1.0 + num_rows * (ratios[depth] - 1.0)  # if all rows have as many
        rate = expected / (ratio + (1 if is_parallel else depth) * pass_share)
        if rate > best_rate:
            best, best_rate = depth, rate
    if best:
        return best
    return 1 if asked.back_off.is_due() and others <= MIN_GAIN else 0
