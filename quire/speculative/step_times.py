"""StepTimes: the measured duration of a step without prompts, by its rows and by its drafts.

The duration without drafts is measured in seconds, and others relative to it. Contexts grow, and the machine becomes
slower or faster. So a step with drafts that takes longer than expected changes both a little.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FASTER_WEIGHT, SLOWER_WEIGHT = 0.1, 0.05  # of a measurement below or above: interruptions only take longer
MAX_RATIO = 1.5  # a measurement counts as at most this many times the estimate
MAX_AGE = 8  # steps after which ratios are computed again
PRIOR_STEPS = 3.0  # weight of the guess for a number of drafts that was measured a few times
OPTIMISM = 0.5  # the guess for what was never measured, relative to what the device suggests: else it is never tried
MANY_DRAFTS = 1 << 20  # more than are ever proposed
MAX_COUNT = 20  # measurements after which an average moves by the weights above, and before it as a plain mean


@dataclass(slots=True)
class Average:
    """A moving average."""

    value: float
    count: int = 1

    def learn(self, measured: float, weight: float = 1.0) -> None:
        change = min(MAX_RATIO, measured / self.value) - 1.0
        self.count += 1
        steady = FASTER_WEIGHT if change < 0.0 else SLOWER_WEIGHT
        self.value *= 1.0 + weight * max(steady, 1.0 / self.count if self.count < MAX_COUNT else 0.0) * change


@dataclass(slots=True)
class Rows:
    """Steps of one number of rows."""

    plain: Average  # seconds
    ratios: dict[int, Average] = field(default_factory=dict)  # by drafts


@dataclass(slots=True)
class StepTimes:
    """`free_drafts` is how many drafts double the duration of a small step, before any has been measured."""

    free_drafts: float
    _rows: dict[int, Rows] = field(default_factory=dict)
    _ratios: dict[int, list[float]] = field(default_factory=dict)  # by rows, as they were a few steps ago
    _age: int = 0  # of these, in steps

    def learn(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        self._age += 1
        if self._age >= MAX_AGE:
            self._age = 0
            self._ratios.clear()
        rows = self._rows.get(bucket(num_rows))
        if rows is None:
            if not num_drafts:
                self._rows[bucket(num_rows)] = Rows(Average(seconds))
            return
        if not num_drafts:
            rows.plain.learn(seconds)
            return
        ratio, known = seconds / rows.plain.value, rows.ratios.get(bucket(num_drafts))
        if known is None:
            expected = self.ratios(num_rows, num_drafts)[num_drafts]
            rows.ratios[bucket(num_drafts)] = Average(min(ratio, MAX_RATIO * expected))
            return
        rows.plain.learn(rows.plain.value * ratio / known.value, weight=0.5)
        known.learn(ratio)

    def plain_s(self, num_rows: int) -> float | None:
        """The duration of a step without drafts. None if it has not been measured."""
        rows = self._rows.get(bucket(num_rows))
        return None if rows is None else rows.plain.value

    def ratios(self, num_rows: int, max_drafts: int) -> list[float]:
        """For 0, 1, ... drafts: the duration of a step relative to one without drafts. It never decreases.

        There may be more numbers than wanted.
        """
        ratios = self._ratios.get(num_rows)
        if ratios is None or len(ratios) <= max_drafts:
            ratios = self._ratios[num_rows] = self._find_ratios(num_rows, max_drafts)
        return ratios

    def max_drafts(self, num_rows: int) -> int:
        """The most drafts that a step should have. It grows step by step, so that a wrong guess costs little."""
        rows = self._rows.get(bucket(num_rows))
        measured = max(rows.ratios, default=0) if rows is not None else 0
        return 2 * measured + max(1, num_rows // 4)

    def _find_ratios(self, num_rows: int, max_drafts: int) -> list[float]:
        rows = self._rows.get(bucket(num_rows))
        slope = OPTIMISM / max(self.free_drafts, num_rows)
        ratios: list[float] = []
        low, low_ratio = 0, 1.0
        for num_drafts, known in sorted(rows.ratios.items()) if rows is not None else ():
            guess = low_ratio + slope * (num_drafts - low)
            ratio = max(1.0, (known.count * known.value + PRIOR_STEPS * guess) / (known.count + PRIOR_STEPS))
            share = (ratio - low_ratio) / (num_drafts - low)
            ratios += [low_ratio + share * (count - low) for count in range(low, num_drafts)]
            low, low_ratio = num_drafts, ratio
        ratios += [low_ratio + slope * (count - low) for count in range(low, max(low, max_drafts) + 1)]
        for count in range(len(ratios) - 2, -1, -1):  # more drafts never take less time: what seems so is noise
            ratios[count] = min(ratios[count], ratios[count + 1])
        return ratios


class EqualTimes(StepTimes):
    """Steps take the same time with any number of drafts, so all that are proposed are verified: for counting them."""

    def learn(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        pass

    def plain_s(self, num_rows: int) -> float | None:
        return 1.0

    def ratios(self, num_rows: int, max_drafts: int) -> list[float]:
        return [1.0] * (max_drafts + 1)

    def max_drafts(self, num_rows: int) -> int:
        return MANY_DRAFTS


def bucket(count: int) -> int:
    """Exact up to 16, then in steps of a quarter of a power of two."""
    if count <= 16:
        return count
    step = 1 << (count.bit_length() - 3)
    return (count + step // 2) // step * step
