"""StepTimes: the measured duration of a step without prompts, by its rows and by its drafts.

Durations drift together: contexts grow, and the machine becomes slower or faster. So each measurement moves a common
factor quickly and its own entry slowly, and an entry that is seldom measured stays comparable.
"""

from __future__ import annotations

from dataclasses import dataclass, field

DRIFT_WEIGHT = 0.15
FASTER_WEIGHT, SLOWER_WEIGHT = 0.2, 0.04  # of a measurement below or above its entry: interruptions only take longer
PRIOR_STEPS = 3.0  # weight of the guess for an entry that was measured a few times
MAX_RATIO = 1.5  # a measurement counts as at most this many times the estimate


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
            plain_s = self.plain_s(num_rows)
            if plain_s is not None:
                seconds = min(seconds, MAX_RATIO * plain_s * self.ratios(num_rows, num_drafts)[num_drafts])
            row_entries[bucket(num_drafts)] = Entry(seconds / self._drift)
            return
        ratio = min(MAX_RATIO, seconds / (entry.seconds * self._drift))
        entry.count += 1
        entry.seconds *= 1.0 + (FASTER_WEIGHT if ratio < 1.0 else SLOWER_WEIGHT) * (ratio - 1.0)
        self._drift *= 1.0 + DRIFT_WEIGHT * (ratio - 1.0)

    def is_known(self, num_rows: int, num_drafts: int) -> bool:
        return bucket(num_drafts) in self._entries.get(bucket(num_rows), {})

    def plain_s(self, num_rows: int) -> float | None:
        """The duration of a step without drafts. None if it has not been measured."""
        entry = self._entries.get(bucket(num_rows), {}).get(0)
        return None if entry is None else entry.seconds * self._drift

    def ratios(self, num_rows: int, max_drafts: int) -> list[float]:
        """For 0, 1, ... drafts: the duration of a step relative to one without drafts. It never decreases."""
        slope = 1.0 / max(self.free_drafts, num_rows)
        row_entries = self._entries.get(bucket(num_rows), {})
        plain = row_entries.get(0)
        ratios: list[float] = []
        low, low_ratio = 0, 1.0
        for num_drafts in sorted(row_entries) if plain is not None else []:
            if not num_drafts or plain is None:
                continue
            entry = row_entries[num_drafts]
            guess = low_ratio + slope * (num_drafts - low)
            ratio = (entry.count * entry.seconds / plain.seconds + PRIOR_STEPS * guess) / (entry.count + PRIOR_STEPS)
            share = (max(1.0, ratio) - low_ratio) / (num_drafts - low)
            ratios += [low_ratio + share * (count - low) for count in range(low, num_drafts)]
            low, low_ratio = num_drafts, max(1.0, ratio)
        ratios += [low_ratio + slope * (count - low) for count in range(low, max(low, max_drafts) + 1)]
        for count in range(len(ratios) - 2, -1, -1):  # more drafts never take less time: what seems so is noise
            ratios[count] = min(ratios[count], ratios[count + 1])
        return ratios[: max_drafts + 1]


def bucket(count: int) -> int:
    """Exact up to 16, then in steps of a quarter of a power of two."""
    if count <= 16:
        return count
    step = 1 << (count.bit_length() - 3)
    return (count + step // 2) // step * step
