"""What makes drafts: the interface between the controller and its proposers. Plug-ins implement it too.

A proposer is named as `module:Class`. It affects only the speed: every draft is verified, so a wrong draft costs time
and never changes an answer. `suffix.py` is an example.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from quire.core.drafts import Drafts
from quire.core.request import Request


class Context(NamedTuple):
    """What a proposer sees of a request.

    request_id   identifies the request until `finish`
    tokens       prompt and answer so far: a list that only grows. A proposer processes what is new since its last call
                 for the request. If the list is shorter than before, the request began again
    num_prompt   how many of the tokens are the prompt
    salt         the tenant's key. Requests with different salts must not influence each other's drafts: otherwise the
                 time that an answer takes tells one tenant what another one generates
    prediction   tokens that the client expects as the answer. May be empty
    """

    request_id: str
    tokens: Sequence[int]
    num_prompt: int
    salt: bytes
    prediction: Sequence[int] = ()


class Proposer(Protocol):
    """Guesses the next tokens of requests.

    The engine calls a proposer from one thread, before each step. The step starts when `propose` returns, so its time
    is part of every token's time.
    """

    name: str  # in metrics and logs, and as `Drafts.source`

    def propose(self, contexts: Sequence[Context], max_drafts: Sequence[int]) -> list[Drafts | None]:
        """Drafts for each request, or None where there is nothing to propose.

        `max_drafts` has the most nodes that are useful for each request; it may be 0. `Drafts.odds` should order drafts
        by the chance that they are right. They need not be exact, because the controller measures how often drafts with
        such odds are right. The likeliest path comes first among the nodes. A proposer that raises
        repeatedly, or returns what breaks these rules, is no longer called.
        """
        ...

    def finish(self, request_id: str) -> None:
        """The request has ended. Its id may be unknown: not every request was proposed for."""
        ...

    def reset(self) -> None:
        """All requests have ended, or begin again. What was learnt from earlier requests may stay."""
        ...


class ModelProposer(Protocol):
    """A proposer that runs a model of its own on the engine's cache. A call takes time, so it is not always called."""

    name: str

    @property
    def is_parallel(self) -> bool:
        """Whether all drafts come from one pass, so that a call takes as long for any number of them. Otherwise each
        draft is computed after the one before it."""
        ...

    @property
    def drafts_per_pass(self) -> int:
        """How many drafts of a request are wanted of each pass of a model that is not parallel: 1 for a chain, more for
        a tree with as many nodes a depth."""
        ...

    def catch_up(self, requests: Sequence[Request]) -> None:
        """Compute what is missing of the requests' tokens, without the last one."""
        ...

    def propose_requests(self, requests: Sequence[Request], max_drafts: Sequence[int]) -> list[Drafts | None]:
        """Up to `max_drafts` drafts for each request, none if that is 0: a chain, or a tree. With odds."""
        ...

    def finish(self, request_id: str) -> None: ...

    def reset(self) -> None: ...
