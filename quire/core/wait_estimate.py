"""estimate_waits: in how many seconds each waiting request is admitted, from measured times. No promise.

Running requests end after as many tokens as recent answers had. In order, each waiting request takes rows and blocks of
those that end first, and then its prompt is computed. The server calls this with what an engine shows of itself.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_LENGTHS = 256  # of recent answers
RATE_DECAY = 0.95  # of what was measured before, with each new measurement


@dataclass(frozen=True, slots=True)
class Demand:
    """What a running request has, or a waiting one needs."""

    num_prompt_tokens: int  # that are not computed yet
    num_output_tokens: float  # expected before its end
    num_rows: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Supply:
    """What is free now, and how long tokens take."""

    num_rows: int
    num_blocks: int
    output_token_s: float  # between two tokens of an answer
    prompt_token_s: float
    waits_for_all: bool = False  # none is admitted before all running requests have ended (static batching)
    hold_s: float = 0.0  # until the batching policy admits any


class AnswerLengths:
    """Lengths of recent answers: how many tokens more an answer is expected to have."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=MAX_LENGTHS)
        self._sorted: list[int] = []
        self._sums: list[int] = [0]

    def add(self, num_tokens: int) -> None:
        self._recent.append(num_tokens)
        self._sorted.clear()

    def expected_left(self, num_output: int, max_tokens: int) -> float:
        """The average of what longer answers had beyond `num_output`; up to `max_tokens` if there were none."""
        if not self._sorted and self._recent:
            self._sorted = sorted(self._recent)
            self._sums = [0]
            for length in self._sorted:
                self._sums.append(self._sums[-1] + length)
        start = bisect_right(self._sorted, num_output)
        num_longer = len(self._sorted) - start
        if not num_longer:
            return max(0, max_tokens - num_output)
        average = (self._sums[-1] - self._sums[start]) / num_longer
        return min(average, max_tokens) - num_output if max_tokens > num_output else 0.0


class OutputRate:
    """The time between two tokens of an answer as it has been lately, with all that came between."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._num_tokens = 0.0

    def add(self, seconds: float, num_tokens: int) -> None:
        """All answers together: their seconds, and their new tokens."""
        self._seconds = self._seconds * RATE_DECAY + seconds
        self._num_tokens = self._num_tokens * RATE_DECAY + num_tokens

    @property
    def token_s(self) -> float | None:
        return self._seconds / self._num_tokens if self._num_tokens >= 1 else None


@dataclass(order=True, slots=True)
class End:
    """A request that ends, and gives its rows and blocks to others."""

    at_s: float
    num_rows: int = field(compare=False)
    num_blocks: int = field(compare=False)


def estimate_waits(running: Sequence[Demand], line: Sequence[Demand], supply: Supply) -> list[float]:
    """Seconds until each request of the line is admitted, in order."""
    prompt_s = sum(each.num_prompt_tokens for each in running) * supply.prompt_token_s  # until they are computed
    ends = [end_of(each, prompt_s, supply) for each in running]
    heapq.heapify(ends)
    now_s = max(supply.hold_s, max((end.at_s for end in ends), default=0.0) if supply.waits_for_all else 0.0)
    num_rows, num_blocks, waits = supply.num_rows, supply.num_blocks, list[float]()
    for demand in line:
        while ends and (demand.num_rows > num_rows or demand.num_blocks > num_blocks or ends[0].at_s <= now_s):
            end = heapq.heappop(ends)
            now_s = max(now_s, end.at_s)
            num_rows, num_blocks = num_rows + end.num_rows, num_blocks + end.num_blocks
        now_s = max(now_s, prompt_s)
        waits.append(now_s)
        num_rows, num_blocks = num_rows - demand.num_rows, num_blocks - demand.num_blocks
        prompt_s = now_s + demand.num_prompt_tokens * supply.prompt_token_s
        heapq.heappush(ends, end_of(demand, prompt_s, supply))
    return waits


def end_of(demand: Demand, prompt_s: float, supply: Supply) -> End:
    """The end of a request whose prompt is computed at `prompt_s`."""
    return End(prompt_s + demand.num_output_tokens * supply.output_token_s, demand.num_rows, demand.num_blocks)
