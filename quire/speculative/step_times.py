"""StepTimes: the measured duration of a step without prompts, by its rows and by its drafts.

Durations drift together: contexts grow, and the machine becomes slower or faster. So each measurement moves a common
factor quickly and its own entry slowly, and an entry that is seldom measured stays comparable.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

DRIFT_WEIGHT, ENTRY_WEIGHT = 0.1, 0.1
FIRST_WEIGHT = 0.5  # of the first measurements of an entry
MAX_RATIO = 2.0  # a measurement counts as at most this many times the estimate: it may be an interruption


@dataclass(slots=True)
class Entry:
    seconds: float  # relative to the common factor
    count: int = 1


@dataclass(slots=True)
class StepTimes:
    """`free_drafts` is how many drafts double the duration of a small step, before any has been measured."""

    free_drafts: float
    _drift: float = 1.0
    _entries: dict[int, dict[int, Entry]] = field(default_factory=dict)  # by rows, by drafts

    def learn(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        row_entries = self._entries.setdefault(bucket(num_rows), {})
        entry = row_entries.get(bucket(num_drafts))
        if entry is None:
            row_entries[bucket(num_drafts)] = Entry(seconds / self._drift)
            return
        ratio = min(MAX_RATIO, seconds / (entry.seconds * self._drift))
        entry.count += 1
        weight = max(FIRST_WEIGHT / entry.count, ENTRY_WEIGHT)
        entry.seconds *= 1.0 + weight * (ratio - 1.0)
        self._drift *= 1.0 + DRIFT_WEIGHT * (ratio - 1.0)

    def is_known(self, num_rows: int, num_drafts: int) -> bool:
        return bucket(num_drafts) in self._entries.get(bucket(num_rows), {})

    def plain_s(self, num_rows: int) -> float | None:
        """The duration of a step without drafts. None if it has not been measured."""
        entry = self._entries.get(bucket(num_rows), {}).get(0)
        return None if entry is None else entry.seconds * self._drift

    def ratios(self, num_rows: int, max_drafts: int) -> list[float]:
        """For 0, 1, ... drafts: the duration of a step relative to one without drafts."""
        row_entries = self._entries.get(bucket(num_rows), {})
        plain = row_entries.get(0)
        slope = 1.0 / max(self.free_drafts, num_rows)
        if plain is None:
            return [1.0 + slope * num_drafts for num_drafts in range(max_drafts + 1)]
        known = sorted(row_entries)
        values = [max(1.0, row_entries[each].seconds / plain.seconds) for each in known]
        ratios: list[float] = []
        for num_drafts in range(max_drafts + 1):
            at = bisect_left(known, num_drafts)
            if at == len(known):
                ratios.append(values[-1] + slope * (num_drafts - known[-1]))
            elif known[at] == num_drafts:
                ratios.append(values[at])
            else:
                low, high = known[at - 1], known[at]
                share = (num_drafts - low) / (high - low)
                ratios.append(values[at - 1] + share * (values[at] - values[at - 1]))
        return ratios


def bucket(count: int) -> int:
    """Exact up to 16, then in steps of a quarter of a power of two."""
    if count <= 16:
        return count
    step = 1 << (count.bit_length() - 3)
    return (count + step // 2) // step * step
