"""Ledger: the seconds that speculation has gained or lost. It stops speculation before a loss adds up.

A step with drafts is charged with its own duration. It is credited with the time that plain steps would have taken for
the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_CREDIT_STEPS = 16.0  # plain steps of gain that later losses may use up
DEBT_SHARE = 0.5  # of the limit, from which on a loss is a debt


@dataclass(slots=True)
class Ledger:
    """`max_loss` is the share of the time that may be lost, and `grace` the plain steps that may be lost at first."""

    max_loss: float
    grace: float = 1.0
    balance_s: float = 0.0  # gained minus lost, capped
    total_s: float = 0.0  # time seen
    gained_s: float = 0.0  # gained minus lost

    def add(self, spent_s: float, plain_s: float) -> None:
        """A step took `spent_s`. Without drafts its tokens would have taken `plain_s`."""
        self.total_s += spent_s
        self.gained_s += plain_s - spent_s
        self.balance_s += plain_s - spent_s

    def may_lose(self, seconds: float, step_s: float) -> bool:
        """Whether a loss of `seconds` is within the limit. `step_s` is the duration of a plain step."""
        self.balance_s = min(self.balance_s, MAX_CREDIT_STEPS * step_s)
        return self.balance_s - seconds >= -(self.max_loss * self.total_s + self.grace * step_s)

    def is_in_debt(self, step_s: float) -> bool:
        return self.balance_s < -DEBT_SHARE * (self.max_loss * self.total_s + self.grace * step_s)
