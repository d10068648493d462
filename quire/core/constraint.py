"""Constraint: what an answer must look like, asked token by token. `text/grammar.py` makes them; the sampler asks.

A request's constraint has been told every token of the answer so far, in order.
"""

from __future__ import annotations

from typing import Protocol


class Constraint(Protocol):
    error: str  # why nothing is allowed any more, when that is the constraint's own fault

    def allowed(self) -> bytes:
        """The tokens that may come next: a bit each, the lowest of a byte first, ids past the end are forbidden."""
        ...

    def advance(self, token: int) -> None:
        """The answer has this token next."""
        ...
