"""StepCosts: measured durations of steps. With them the scheduler chooses between swap and recomputation, and how many
prompt tokens a step computes beside decode rows.

The runner times steps by the device's clock, since the host reads a step some time after its end. `engine.py` and the
simulator record them here.
"""

from __future__ import annotations

from quire.core.pace import Pace, moving_average
from quire.core.plan import Plan
from quire.core.swap import SwapCosts

MIN_TOKENS = 128  # of prompts; the time of a smaller step is that of reading the weights


class StepCosts:
    """Records durations of steps in `SwapCosts` and `Pace`, and predicts the next step's."""

    def __init__(self, swap: SwapCosts, pace: Pace, max_tokens_per_step: int) -> None:
        self._swap = swap
        self._pace = pace
        self._by_size: dict[int, float] = {}  # seconds of steps with prompts, by their tokens in units of `Pace.unit`
        self._pace.min_tokens = min_prompt_tokens(max_tokens_per_step, 4)
        self._min_swap_tokens = min_prompt_tokens(max_tokens_per_step, 2)

    def learn(self, plan: Plan, seconds: float) -> None:
        num_tokens = plan.num_tokens
        num_prompt = num_tokens - len(plan)
        self._pace.learn(num_prompt, seconds)
        if num_prompt:
            size = self._size(plan)
            self._by_size[size] = moving_average(self._by_size.get(size), seconds)
        if num_prompt >= self._min_swap_tokens:
            self._swap.compute_s = moving_average(self._swap.compute_s, seconds / num_tokens, faster=1.0)

    def predict(self, plan: Plan) -> float | None:
        """Seconds of a step: the average of its size, or an estimate by `Pace`. None if there is no measurement yet."""
        decode_s, token_s = self._pace.decode_s, self._pace.token_s
        num_prompt = plan.num_tokens - len(plan)
        if not num_prompt:
            return decode_s
        if (known_s := self._by_size.get(self._size(plan))) is not None:
            return known_s
        return None if decode_s is None or token_s is None else decode_s + num_prompt * token_s

    def _size(self, plan: Plan) -> int:
        return -(-plan.num_tokens // self._pace.unit)


def min_prompt_tokens(max_tokens_per_step: int, divisor: int) -> int:
    """The fewest prompt tokens in a step whose duration says what a prompt token costs."""
    return max(1, min(MIN_TOKENS, max_tokens_per_step // divisor))
