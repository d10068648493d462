"""What it costs to bring a preempted request back, measured: the scheduler compares the two ways.

Copies are timed once, when an engine is built. Computing is timed by the steps that compute prompts, on the host's
clock and without waiting for anything: a step has the device to itself from its launch, or the last one's end if that
is later, to its own end. `engine.py` calls this.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from quire.core.plan import Plan
from quire.core.swap import SwapCosts
from quire.engine.cache import CacheTensors

LEAST_TOKENS = 128  # of prompts; a smaller step takes as long as it takes to read the weights
TRUST = 0.1  # how much of a slower step is believed


class PromptClock:
    """Keeps `costs.compute_s` up to date.

    A faster step is believed at once and a slower one bit by bit: it may have compiled a kernel or waited for the host.
    """

    def __init__(self, costs: SwapCosts, max_tokens_per_step: int) -> None:
        self._costs = costs
        self._least = min(LEAST_TOKENS, max_tokens_per_step // 2)
        self._landed_s = 0.0

    def land(self, plan: Plan, launched_s: float, now_s: float) -> None:
        """A plan's results are here."""
        seconds = now_s - max(launched_s, self._landed_s)
        self._landed_s = now_s
        num_tokens = plan.num_tokens
        if num_tokens - len(plan) < self._least:
            return
        measured, known = seconds / num_tokens, self._costs.compute_s
        if known is not None and measured > known:
            measured = known + TRUST * (measured - known)
        self._costs.compute_s = measured


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
