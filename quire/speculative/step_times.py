"""StepTimes: the measured duration of a step without prompts, by its rows and by its drafts.

The duration without drafts is measured in seconds, and others relative to it. Contexts grow, and the machine becomes
slower or faster. So the duration without drafts is that of the last few plain steps, and one is due every so often:
else what was slow once would make drafts look cheap for ever.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

RATIO_WEIGHT = 0.08  # of a measurement, relative to the estimate
MAX_COUNT = 12  # measurements after which an average moves by this weight, and before it as a plain mean
MAX_RATIO = 1.5  # a measurement counts as at most this many times the estimate: interruptions only take longer
NUM_PLAIN = 3  # plain steps whose median counts
PLAIN_EVERY, PLAIN_SOON = 64, 8  # steps with drafts until a plain one is due; the second while that is not settled
SETTLED = 0.08  # by how much the last plain step may differ from the median
FRESH_STEPS = 16  # steps behind a plain one that are compared with it
FEW_STEPS = 5  # measurements of a number of drafts up to which all count
MAX_AGE = 8  # steps after which ratios are computed again
PRIOR_STEPS = 3.0  # weight of the guess for a number of drafts that was measured a few times
OPTIMISM = 0.5  # the guess for what was never measured, relative to what the device suggests: else it is never tried
MANY_DRAFTS = 1 << 20  # more than are ever proposed


@dataclass(slots=True)
class Average:
    """A moving average."""

    value: float
    count: int = 1

    def learn(self, measured: float) -> None:
        change = min(MAX_RATIO, measured / self.value) - 1.0
        self.count += 1
        self.value *= 1.0 + max(RATIO_WEIGHT, 1.0 / self.count if self.count < MAX_COUNT else 0.0) * change


@dataclass(slots=True)
class Rows:
    """Steps of one number of rows."""

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_PLAIN))  # seconds, the last steps
    plain_s: float = 0.0  # their median
    num_drafted: int = 0  # steps with drafts since the last plain one
    ratios: dict[int, Average] = field(default_factory=dict)  # by drafts

    @property
    def is_settled(self) -> bool:
        return len(self.plain) == NUM_PLAIN and abs(self.plain[-1] / self.plain_s - 1.0) < SETTLED

    def learn_plain(self, seconds: float) -> None:
        self.num_drafted = 0
        self.plain.append(seconds)
        self.plain_s = median(self.plain)


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
        if not num_drafts:
            if rows is None:
                rows = self._rows[bucket(num_rows)] = Rows()
            rows.learn_plain(seconds)
        elif rows is not None:
            self._learn_ratio(rows, num_rows, num_drafts, seconds / rows.plain_s)

    def _learn_ratio(self, rows: Rows, num_rows: int, num_drafts: int, ratio: float) -> None:
        rows.num_drafted += 1
        if (known := rows.ratios.get(bucket(num_drafts))) is not None:
            if rows.num_drafted <= FRESH_STEPS or known.count < FEW_STEPS:
                known.learn(ratio)
            return
        expected = self.ratios(num_rows, num_drafts)[num_drafts]
        rows.ratios[bucket(num_drafts)] = Average(min(ratio, MAX_RATIO * expected))

    def is_plain_due(self, num_rows: int) -> bool:
        """Whether the next step should have no drafts, so that the duration of a plain one is known."""
        rows = self._rows.get(bucket(num_rows))
        return rows is None or rows.num_drafted >= (PLAIN_EVERY if rows.is_settled else PLAIN_SOON)

    def plain_s(self, num_rows: int) -> float | None:
        """The duration of a step without drafts. None if it has not been measured."""
        rows = self._rows.get(bucket(num_rows))
        return None if rows is None else rows.plain_s

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

    def is_plain_due(self, num_rows: int) -> bool:
        return False

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
