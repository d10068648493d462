"""What follows an answer token by token. A Constraint says which tokens may come next: `text/grammar.py` makes them,
the sampler asks. A StopMatcher finds stop strings in beams: see `text/detokenizer.py`.

Both have been told every token of the answer so far, in order. A beam that forks copies them.
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

    def copy(self) -> Constraint:
        """One that has been told the same tokens."""
        ...


class StopMatcher(Protocol):
    def advance(self, token: int) -> bool:
        """The answer has this token next; whether it completes a stop string."""
        ...

    def copy(self) -> StopMatcher:
        """One that has been told the same tokens."""
        ...
