"""FreeDrafts: step times with which every draft that is proposed is verified."""

from __future__ import annotations

from quire.speculative.step_times import StepTimes


class FreeDrafts(StepTimes):
    """Steps take the same time with any number of drafts."""

    def learn(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        pass

    def plain_s(self, num_rows: int) -> float | None:
        return 1.0

    def ratios(self, num_rows: int, max_drafts: int) -> list[float]:
        return [1.0] * (max_drafts + 1)

    def max_drafts(self, num_rows: int) -> int:
        return 1 << 30
