"""What steps and copies take, measured: the scheduler chooses by it how preempted requests come back, and how much of
a prompt is computed beside answers that run.

Copies are timed once, when an engine is built. Steps are timed by the runner, on the device's clock: when the host
looks at a step says nothing about when it ended. `engine.py` calls this.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from quire.core.pace import Pace, blend
from quire.core.plan import Plan
from quire.core.swap import SwapCosts
from quire.engine.cache import CacheTensors

LEAST_TOKENS = 128  # of prompts; a smaller step takes as long as it takes to read the weights


class StepCosts:
    """Tells what steps took to those who plan by it, `SwapCosts` and `Pace`, and what the next one will take."""

    def __init__(self, swap: SwapCosts, pace: Pace, max_tokens_per_step: int) -> None:
        self._swap = swap
        self._pace = pace
        self._by_size: dict[int, float] = {}  # seconds of steps with prompts, by their tokens in units of Pace
        self._pace.min_tokens = least_tokens(max_tokens_per_step, 4)
        self._least = least_tokens(max_tokens_per_step, 2)

    def learn(self, plan: Plan, seconds: float) -> None:
        num_tokens = plan.num_tokens
        num_prompt = num_tokens - len(plan)
        self._pace.learn(num_prompt, seconds)
        if num_prompt:
            size = self._size(plan)
            self._by_size[size] = blend(self._by_size.get(size), seconds)
        if num_prompt >= self._least:
            self._swap.compute_s = blend(self._swap.compute_s, seconds / num_tokens, faster=1.0)

    def predict(self, plan: Plan) -> float | None:
        """Seconds of a step: what others of its size took, or what Pace says of so many tokens. None is unknown."""
        decode_s, token_s = self._pace.decode_s, self._pace.token_s
        num_prompt = plan.num_tokens - len(plan)
        if not num_prompt:
            return decode_s
        if (known_s := self._by_size.get(self._size(plan))) is not None:
            return known_s
        return None if decode_s is None or token_s is None else decode_s + num_prompt * token_s

    def _size(self, plan: Plan) -> int:
        return -(-plan.num_tokens // self._pace.unit)


def least_tokens(max_tokens_per_step: int, part: int) -> int:
    """Of prompts in a step that tells what they cost, where steps have at most so many tokens."""
    return max(1, min(LEAST_TOKENS, max_tokens_per_step // part))


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
