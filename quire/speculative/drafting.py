"""Drafting: how many tokens a device drafts behind a step, which it does before the host knows the step's tokens.

So the decision uses how often such drafts were right so far, and what steps with so many drafts took. That includes the
time of drafting: the device does it between two steps. The controller calls this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.speculative.asking import MIN_GAIN
from quire.speculative.back_off import BackOff

DEPTHS = (1, 3, 5)  # each is captured for itself
# Tokens behind whose steps nothing was drafted and whose keys are computed together: padded to one of these numbers.
KEPT_SIZES = (16, 128, 2048)
PASS_RATIO = 0.06  # of one pass, relative to a plain step, until steps with drafts have been measured


@dataclass(slots=True)
class Drafting:
    """`name` is the drafter's, and `max_depth` the most drafts of a row. If drafts do not pay, they are tried again
    later."""

    name: str
    max_depth: int
    back_off: BackOff = field(default_factory=BackOff)

    def choose_depth(self, rates: Sequence[float], num_rows: int, ratios: Sequence[float]) -> int:
        """`rates` of right drafts, of the requests that can have some, among `num_rows`. `ratios` are durations of
        steps by drafts, relative to a plain one."""
        best, best_rate = 0, MIN_GAIN
        for depth in (each for each in DEPTHS if each <= self.max_depth and len(rates) * each < len(ratios)):
            expected = 1.0 + sum(sum(rate**nth for nth in range(1, depth + 1)) for rate in rates) / num_rows
            ratio = max(ratios[len(rates) * depth], 1.0 + PASS_RATIO * depth)
            if expected / ratio > best_rate:
                best, best_rate = depth, expected / ratio
        if best:
            self.back_off.reset()
            return best
        return DEPTHS[0] if self.back_off.is_due() else 0


def count_kept(max_rows: int) -> int:
    """The most tokens whose states the device keeps, so that a head computes their keys later."""
    return max(KEPT_SIZES[-1], max_rows)
