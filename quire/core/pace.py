"""Pace: how many prompt tokens a step may compute beside requests that decode (chunked prefill).

A step ends for all of its rows at once, so a long prompt delays the next token of every request that decodes. The
scheduler calls `prompt_tokens` before each step. The engine calls `learn` with the duration of each step.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_TOKENS = 64  # prompts make progress however slow steps are
FIRST_TOKENS = 256  # prompt tokens in a step before any has been measured
BACKLOG_STEPS = 4  # a backlog too large for the target is spread over this many steps
MAX_STRETCH = 4.0  # the longest step that a backlog causes, relative to the target
SLOWER_WEIGHT, FASTER_WEIGHT = 0.3, 0.5  # of a measurement above or below the estimate, in the moving average
MAX_SLOWDOWN = 2.0  # a measurement counts as at most this many times the estimate
MIN_DURATION_S = 1e-7  # for a step that the clock measures as 0
MIN_PROMPT_SHARE = 0.1  # the smallest share of a step's time that is attributed to its prompts
MIN_STEP_RATIO = 1.5  # the target is raised to this many times `decode_s`, so prompts get a third of a slow step


@dataclass(slots=True)
class Pace:
    """A target for the inter-token latency, and estimates of step durations. None is no target, or not measured yet.

    Steps keep to the target while few prompt tokens wait. When more of them wait than BACKLOG_STEPS such steps compute,
    steps grow with the backlog, up to MAX_STRETCH times the target. This trades inter-token latency for time to first
    token.
    """

    target_s: float | None = None
    unit: int = 1  # a step takes as long as one of the next multiple of `unit` tokens
    decode_s: float | None = None  # duration of a step without prompts
    token_s: float | None = None  # additional duration for each prompt token
    min_tokens: int = MIN_TOKENS  # prompt tokens that a step may compute even if they exceed the target

    def prompt_tokens(self, num_waiting: int, num_running: int, max_tokens: int) -> int:
        """How many prompt tokens the next step may compute beside one token for each running request.

        `num_waiting` counts the prompt tokens not computed yet, of running and of waiting requests.
        """
        if self.target_s is None:
            return max_tokens
        step_s = max(self.target_s, MIN_STEP_RATIO * (self.decode_s or 0.0))
        least, most = self._fit(step_s), self._fit(MAX_STRETCH * step_s)
        return min(max_tokens, self._round(max(least, min(num_waiting // BACKLOG_STEPS, most)), num_running))

    def learn(self, num_prompt_tokens: int, seconds: float) -> None:
        """Update the estimates with a step's duration. A few prompt tokens are too noisy to estimate `token_s`."""
        if not num_prompt_tokens:
            self.decode_s = moving_average(self.decode_s, seconds)
            return
        if self.decode_s is not None:
            # An upper bound: under load, steps without prompts may be rare.
            self.decode_s = min(self.decode_s, max(seconds, MIN_DURATION_S))
        if num_prompt_tokens >= self.min_tokens:
            share_s = max(seconds - (self.decode_s or 0.0), MIN_PROMPT_SHARE * seconds)
            self.token_s = moving_average(self.token_s, share_s / num_prompt_tokens)

    def _fit(self, seconds: float) -> int:
        """How many prompt tokens a step of this duration computes."""
        if self.token_s is None:
            return FIRST_TOKENS
        return max(self.min_tokens, int((seconds - (self.decode_s or 0.0)) / self.token_s))

    def _round(self, num_tokens: int, num_running: int) -> int:
        """Round the step's tokens down to a multiple of `unit`, or up if that loses over a quarter of `num_tokens`."""
        down = (num_tokens + num_running) // self.unit * self.unit - num_running
        return down if down >= 0.75 * num_tokens else down + self.unit


def moving_average(estimate: float | None, measured: float, faster: float = FASTER_WEIGHT) -> float:
    """A moving average, updated with one measurement. Slower measurements may be outliers, and weigh less."""
    if estimate is None:
        return max(measured, MIN_DURATION_S)
    measured = min(max(measured, MIN_DURATION_S), MAX_SLOWDOWN * estimate)
    return estimate + (SLOWER_WEIGHT if measured > estimate else faster) * (measured - estimate)
