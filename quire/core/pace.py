"""Pace: how many prompt tokens a step may take beside requests that are being answered.

A step ends for all of its rows at once, so a long prompt holds up every answer that runs beside it. The scheduler asks
here before each step; whoever runs the steps measures them and writes what they took.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_TOKENS = 64  # of prompts in a step, however slow steps are: who waits makes progress
FIRST_TOKENS = 256  # as long as no step has been measured
STEPS = 4  # over which waiting prompts are spread, once they are too many for the target
MAX_STRETCH = 4.0  # times the target: how long steps become by that


@dataclass(slots=True)
class Pace:
    """A target for the time between two tokens of an answer, and what steps take. None is unknown, or no target.

    The target holds while prompts are few. When more of them wait than a few such steps compute, steps grow with what
    waits, up to MAX_STRETCH times the target: the longer the queue, the more its first tokens count.
    """

    target_s: float | None = None
    unit: int = 1  # a step of a multiple of so many tokens takes no longer than one of fewer
    decode_s: float | None = None  # a step without prompts
    token_s: float | None = None  # for each prompt token, on top of that

    def prompt_tokens(self, num_waiting: int, num_running: int, max_tokens: int) -> int:
        """How many prompt tokens the next step may take beside a token for each running request."""
        if self.target_s is None:
            return max_tokens
        least, most = self._fit(self.target_s), self._fit(MAX_STRETCH * self.target_s)
        tokens = max(least, min(num_waiting // STEPS, most))
        rounded = (tokens + num_running) // self.unit * self.unit - num_running
        return min(max_tokens, rounded if rounded >= MIN_TOKENS else tokens)

    def predict(self, num_prompt_tokens: int) -> float | None:
        """Seconds of a step with so many prompt tokens; None if it has none, nothing is known of such steps, or there
        is no target: then nobody is waited for."""
        if not num_prompt_tokens or self.token_s is None or self.target_s is None:
            return None
        return (self.decode_s or 0.0) + num_prompt_tokens * self.token_s

    def _fit(self, seconds: float) -> int:
        if self.token_s is None:
            return FIRST_TOKENS
        return max(MIN_TOKENS, int((seconds - (self.decode_s or 0.0)) / self.token_s))
