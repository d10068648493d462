"""Protocols that follow an answer token by token. A Constraint gives the tokens allowed next: `text/grammar/` makes it,
the sampler applies it. A StopMatcher finds stop strings in beams: see `text/detokenizer.py`.

Both are advanced by every token of the answer, in order. A forked beam gets copies of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Constraint(Protocol):
    error: str  # why no token is allowed, if the constraint itself is the cause; otherwise empty

    def allowed(self) -> bytes:
        """A bit mask of the tokens allowed next, the lowest bit of a byte first. Ids past its end are not allowed."""
        ...

    def advance(self, token: int) -> None:
        """Append a token to the answer."""
        ...

    def forced(self) -> Sequence[int]:
        """The next tokens, as far as there is only one choice."""
        ...

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first on, may follow. The state does not change."""
        ...

    def copy(self) -> Constraint:
        """An independent copy in the same state."""
        ...


class StopMatcher(Protocol):
    def advance(self, token: int) -> bool:
        """Append a token to the answer. Returns whether it completes a stop string."""
        ...

    def copy(self) -> StopMatcher:
        """An independent copy in the same state."""
        ...
