"""Gate: how much work the server takes on. What does not fit is refused at once, with a time to come back.

The engine's own queue is behind it; requests and prompt tokens are counted from when they pass until they end. The rate
that Retry-After is computed from is what the engine got done over the last half minute or so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.errors import InvalidParams, Overloaded, ShuttingDown

MIN_RETRY_S, MAX_RETRY_S = 1, 600
MEMORY_S = 30.0


class Rate:
    """Tokens per second of late: old ones count less and less."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._at = now()
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """So many tokens took so long to compute."""
        fade = math.exp(-(self._now() - self._at) / MEMORY_S)
        self._at = self._now()
        self._tokens = self._tokens * fade + tokens
        self._seconds = self._seconds * fade + seconds

    @property
    def tokens_per_s(self) -> float | None:
        return self._tokens / self._seconds if self._seconds > 0 else None


class Gate:
    """Counts what has been let in."""

    def __init__(self, max_running: int, max_queue_requests: int, max_queue_tokens: int) -> None:
        self.max_requests = max_running + max_queue_requests
        self.max_tokens = max_queue_tokens
        self.num_requests = 0
        self.num_tokens = 0
        self.draining = False
        self.rate = Rate()

    def check(self, num_requests: int, num_tokens: int) -> None:
        """Refuse requests with so many prompt tokens in all, if there is no room for them."""
        if self.draining:
            raise ShuttingDown("The server is shutting down and takes no new requests; ask another one.")
        if num_requests > self.max_requests or num_tokens > self.max_tokens:
            raise InvalidParams(
                f"One call asks for {num_requests:,} answers to {num_tokens:,} prompt tokens in all, but the server "
                f"takes at most {self.max_requests:,} answers and {self.max_tokens:,} prompt tokens. Split it."
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
        """Room for requests with so many prompt tokens in all, for as long as they take."""
        self.check(num_requests, num_tokens)
        self.num_requests += num_requests
        self.num_tokens += num_tokens
        try:
            yield
        finally:
            self.num_requests -= num_requests
            self.num_tokens -= num_tokens

    def retry_after_s(self) -> int:
        """How long it takes to work off half of what is there, at the rate of late."""
        rate = self.rate.tokens_per_s
        seconds = self.num_tokens / 2 / rate if rate else MIN_RETRY_S
        return min(MAX_RETRY_S, max(MIN_RETRY_S, math.ceil(seconds)))
