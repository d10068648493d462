"""Pace: how many prompt tokens a step may take beside requests that are being answered.

A step ends for all of its rows at once, so a long prompt holds up every answer that runs beside it. The scheduler asks
here before each step; the engine tells it what each step took.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_TOKENS = 64
FIRST_TOKENS = 256  # as long as no step has been measured
STEPS = 4  # over which waiting prompts are spread, once they are too many for the target
MAX_STRETCH = 4.0  # times the target: how long steps become by that
SLOWER, FASTER = 0.3, 0.5  # how much of a step is believed that took longer than known, or less
MAX_SLOWER = 2.0  # times what is known: more is not believed at once
TINY_S = 1e-7  # a clock may not see a step pass
MIN_SHARE = 0.1  # of a step: what its prompts take at least
MIN_STEP = 1.5  # times a step without prompts: where that alone misses the target, prompts still get a third of a step


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
    min_tokens: int = MIN_TOKENS  # of prompts in a step, however slow steps are: who waits makes progress

    def prompt_tokens(self, num_waiting: int, num_running: int, max_tokens: int) -> int:
        """How many prompt tokens the next step may take beside a token for each running request."""
        if self.target_s is None:
            return max_tokens
        step_s = max(self.target_s, MIN_STEP * (self.decode_s or 0.0))
        least, most = self._fit(step_s), self._fit(MAX_STRETCH * step_s)
        return min(max_tokens, self._round(max(least, min(num_waiting // STEPS, most)), num_running))

    def learn(self, num_prompt_tokens: int, seconds: float) -> None:
        """A step with so many prompt tokens took so long. Few of them tell nothing of their share."""
        if not num_prompt_tokens:
            self.decode_s = blend(self.decode_s, seconds)
            return
        if self.decode_s is not None:
            # Under load there may be no step without prompts for long.
            self.decode_s = min(self.decode_s, max(seconds, TINY_S))
        if num_prompt_tokens >= self.min_tokens:
            share_s = max(seconds - (self.decode_s or 0.0), MIN_SHARE * seconds)
            self.token_s = blend(self.token_s, share_s / num_prompt_tokens)

    def _fit(self, seconds: float) -> int:
        if self.token_s is None:
            return FIRST_TOKENS
        return max(self.min_tokens, int((seconds - (self.decode_s or 0.0)) / self.token_s))

    def _round(self, num_tokens: int, num_running: int) -> int:
        """To whole units, down unless that leaves out much: up to the next unit, tokens cost nothing."""
        down = (num_tokens + num_running) // self.unit * self.unit - num_running
        return down if down >= 0.75 * num_tokens else down + self.unit


def blend(known: float | None, measured: float, faster: float = FASTER) -> float:
    """What is known of something after one more look at it. A much slower one may be an accident, and counts less."""
    if known is None:
        return max(measured, TINY_S)
    measured = min(max(measured, TINY_S), MAX_SLOWER * known)
    return known + (SLOWER if measured > known else faster) * (measured - known)
