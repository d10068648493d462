"""Arrival times: an open loop (each request has a time) or a closed loop (a request is sent when another has ended).

In an open loop no request waits for a response, so a slow server gets the same traffic as a fast one. `send` is a
coroutine that records every outcome; it raises nothing but its cancellation.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from time import perf_counter
from typing import Any, TypeVar

MAX_PREFETCHED = 1024

Item = TypeVar("Item")
Send = Callable[[Item, float | None], Coroutine[Any, Any, None]]


def random_times(rate: float, burstiness: float, count: int, seed: str) -> list[float]:
    """Seconds from the first request, with gaps from a gamma distribution of mean 1 / rate.

    A burstiness of 1 is a Poisson process. Below 1 requests come in bursts, above 1 more evenly.
    """
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(seed)
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + rng.gammavariate(burstiness, 1 / (rate * burstiness)))
    return times[:count]


async def open_loop(items: Iterator[Item], times: Sequence[float], send: Send[Item]) -> None:
    """Send each item at its time, counted from now."""
    begin = perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for due_s, item in zip(times, items, strict=True):
            # This yields to the event loop even when late: running streams must be read.
            await asyncio.sleep(max(0.0, begin + due_s - perf_counter()))
            tasks.create_task(send(item, begin + due_s))


async def closed_loop(items: Iterator[Item], concurrency: int, send: Send[Item]) -> None:
    """`concurrency` workers, each sending the next item when its last one has ended."""

    async def work() -> None:
        for item in items:
            await send(item, None)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(work())


def prefetch(items: Iterator[Item], count: int = MAX_PREFETCHED) -> Iterator[Item]:
    """The same items, `count` of them made in advance, so that making one does not delay the next."""
    ready = deque(itertools.islice(items, count))

    def rest() -> Iterator[Item]:
        while ready:
            yield ready.popleft()
            ready.extend(itertools.islice(items, 1))

    return rest()
