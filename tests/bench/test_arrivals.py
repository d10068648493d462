"""When requests are sent."""

from __future__ import annotations

import asyncio
import math
import statistics
from itertools import pairwise

import pytest

from quire.bench.serve.arrivals import closed_loop, open_loop, prefetch, random_times

pytestmark = pytest.mark.core


class TestTimes:
    @pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
    def test_gaps_have_the_wanted_mean_and_spread(self, burstiness):
        times = random_times(20.0, burstiness, 20_001, "seed")
        gaps = [later - earlier for earlier, later in pairwise(times)]
        assert times[0] == 0.0
        assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.05)
        variation = statistics.stdev(gaps) / statistics.fmean(gaps)
        assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)

    def test_the_seed_decides(self):
        assert random_times(2.0, 1.0, 50, "a") == random_times(2.0, 1.0, 50, "a")
        assert random_times(2.0, 1.0, 50, "a") != random_times(2.0, 1.0, 50, "b")

    def test_all_at_once(self):
        assert random_times(math.inf, 1.0, 3, "a") == [0.0, 0.0, 0.0]
        assert random_times(5.0, 1.0, 1, "a") == [0.0]


def test_an_open_loop_waits_for_no_answer():
    """No request ends before all have begun, so a loop that waited for one would never end."""

    async def run() -> list[str]:
        all_begun, begun = asyncio.Event(), []

        async def send(item: str, due: float | None) -> None:
            assert due is not None
            begun.append(item)
            if len(begun) == 4:
                all_begun.set()
            await all_begun.wait()

        await asyncio.wait_for(open_loop(iter("abcd"), [0.0, 0.0, 0.001, 0.002], send), 10)
        return begun

    assert asyncio.run(run()) == list("abcd")


def test_an_open_loop_plans_from_one_beginning():
    async def run() -> list[float]:
        dues: list[float] = []

        async def send(_: str, due: float | None) -> None:
            dues.append(due or 0.0)

        await open_loop(iter("abc"), [0.0, 0.003, 0.004], send)
        return dues

    dues = asyncio.run(run())
    assert [due - dues[0] for due in dues] == pytest.approx([0.0, 0.003, 0.004])


def test_a_late_open_loop_still_lets_streams_be_read():
    """All are due in the past; what was sent first must get its turn before the last is sent."""

    async def run() -> list[int]:
        order: list[int] = []

        async def send(item: int, _: float | None) -> None:
            order.append(item)
            await asyncio.sleep(0)
            order.append(-item)

        await open_loop(iter(range(1, 6)), [0.0] * 5, send)
        return order

    order = asyncio.run(run())
    assert order.index(-1) < order.index(5)


@pytest.mark.parametrize("concurrency", [1, 3, 7])
def test_a_closed_loop_keeps_so_many_open(concurrency):
    async def run() -> tuple[list[int], int]:
        ended, num_open, most = [], 0, 0

        async def send(item: int, due: float | None) -> None:
            nonlocal num_open, most
            assert due is None
            num_open += 1
            most = max(most, num_open)
            for _ in range(item % 4 + 1):
                await asyncio.sleep(0)
            num_open -= 1
            ended.append(item)

        await closed_loop(iter(range(20)), concurrency, send)
        return ended, most

    ended, most = asyncio.run(run())
    assert sorted(ended) == list(range(20))
    assert most == concurrency


def test_items_are_made_in_advance_up_to_a_limit():
    made = []

    def items():
        for number in range(6):
            made.append(number)
            yield number

    ready = prefetch(items(), 3)
    assert made == [0, 1, 2]
    assert next(ready) == 0
    assert list(ready) == [1, 2, 3, 4, 5]
    assert made == list(range(6))
