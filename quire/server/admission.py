"""Admission control: limits on the requests and prompt tokens that run or wait. A request above them is refused.

A request counts from its admission to its end. The queue itself is in the engine. A refusal has a Retry-After, computed
from the throughput of about the last half minute.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.errors import InvalidParams, Overloaded, ShuttingDown

MIN_RETRY_S, MAX_RETRY_S = 1, 600
DECAY_S = 30.0


class Throughput:
    """Recent tokens per second: an average with exponential decay."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._at = now()
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Add a step that computed `tokens` in `seconds`."""
        decay = math.exp(-(self._now() - self._at) / DECAY_S)
        self._at = self._now()
        self._tokens = self._tokens * decay + tokens
        self._seconds = self._seconds * decay + seconds

    @property
    def tokens_per_s(self) -> float | None:
        return self._tokens / self._seconds if self._seconds > 0 else None


class Admission:
    """Counts the requests and prompt tokens that are admitted."""

    def __init__(self, max_running: int, max_queue_requests: int, max_queue_tokens: int) -> None:
        self.max_requests = max_running + max_queue_requests
        self.max_tokens = max_queue_tokens
        self.num_requests = 0
        self.num_tokens = 0
        self.draining = False
        self.throughput = Throughput()

    def check(self, num_requests: int, num_tokens: int) -> None:
        """Raise if these requests would exceed a limit. `num_tokens`: their prompt tokens in all."""
        if self.draining:
            raise ShuttingDown("The server is shutting down and accepts no new requests; send it to another server.")
        if num_requests > self.max_requests or num_tokens > self.max_tokens:
            raise InvalidParams(
                f"One call has {num_requests:,} answers to {num_tokens:,} prompt tokens in all, but the server "
                f"accepts at most {self.max_requests:,} answers and {self.max_tokens:,} prompt tokens. Split it."
            )
        if self.num_requests + num_requests > self.max_requests:
            raise Overloaded(
                f"The queue is full: {self.num_requests:,} requests are in it or running, and at most "
                f"{self.max_requests:,} may be. Try again in {self.retry_after_s()} s.",
                self.retry_after_s(),
            )
        if self.num_tokens + num_tokens > self.max_tokens:
            raise Overloaded(
                f"The queue is full: it holds {self.num_tokens:,} prompt tokens, and at most {self.max_tokens:,} "
                f"may wait. Try again in {self.retry_after_s()} s.",
                self.retry_after_s(),
            )

    @contextmanager
    def admit(self, num_requests: int, num_tokens: int) -> Iterator[None]:
        """Count requests from here to the end of the `with` block."""
        self.check(num_requests, num_tokens)
        self.num_requests += num_requests
        self.num_tokens += num_tokens
        try:
            yield
        finally:
            self.num_requests -= num_requests
            self.num_tokens -= num_tokens

    def retry_after_s(self) -> int:
        """The time in which half of the admitted prompt tokens are computed, at the recent throughput."""
        rate = self.throughput.tokens_per_s
        seconds = self.num_tokens / 2 / rate if rate else MIN_RETRY_S
        return min(MAX_RETRY_S, max(MIN_RETRY_S, math.ceil(seconds)))
