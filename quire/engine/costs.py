"""What steps and copies take, measured: the scheduler chooses by it how preempted requests come back, and how much of
a prompt is computed beside answers that run.

Copies are timed once, when an engine is built. Steps are timed on the host's clock and without waiting for anything: a
step has the device to itself from its launch, or the last one's end if that is later, to its own end. `engine.py` calls
this.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from quire.core.pace import Pace
from quire.core.plan import Plan
from quire.core.swap import SwapCosts
from quire.engine.cache import CacheTensors

LEAST_TOKENS = 128  # of prompts; a smaller step takes as long as it takes to read the weights
SLOWER, FASTER = 0.1, 0.5  # how much of a step is believed that took longer than known, or less


class StepClock:
    """Keeps what is known of steps up to date: `costs.compute_s`, and both of `pace`.

    A faster step is believed sooner than a slower one, which may have waited for the host.
    """

    def __init__(self, costs: SwapCosts, pace: Pace, max_tokens_per_step: int) -> None:
        self._costs = costs
        self._pace = pace
        self._least = max(1, min(LEAST_TOKENS, max_tokens_per_step // 2))
        # Steps that keep the pace are measured too.
        self._least_paced = max(1, min(self._least, max_tokens_per_step // 4))
        self._landed_s = 0.0

    def land(self, plan: Plan, launched_s: float, now_s: float) -> None:
        """A plan's results are here."""
        seconds = now_s - max(launched_s, self._landed_s)
        self._landed_s = now_s
        num_tokens = plan.num_tokens
        num_prompt = num_tokens - len(plan)
        if not num_prompt:
            self._pace.decode_s = blend(self._pace.decode_s, seconds)
        if num_prompt >= self._least:
            self._costs.compute_s = blend(self._costs.compute_s, seconds / num_tokens, faster=1.0)
        if num_prompt >= self._least_paced:
            beside = self._pace.decode_s or 0.0
            self._pace.token_s = blend(self._pace.token_s, max(seconds - beside, 0.1 * seconds) / num_prompt)


def blend(known: float | None, measured: float, faster: float = FASTER) -> float:
    if known is None:
        return measured
    return known + (SLOWER if measured > known else faster) * (measured - known)


def time_copies(cache: CacheTensors, device: torch.device) -> float:
    """Seconds that a block takes to the host and back: of a trial with block 0, which nobody reads."""
    count = cache.host.piece_slots
    slots = range(count)

    def trial() -> None:
        cache.swap_blocks([(0, slot) for slot in slots], [(slot, 0) for slot in slots])

    trial()  # makes the buffers
    return seconds_of(trial, device) / count


def seconds_of(action: Callable[[], None], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        action()
        return time.perf_counter() - begin
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin_event.record()
    action()
    end_event.record()
    end_event.synchronize()
    return float(begin_event.elapsed_time(end_event)) / 1000
