"""What crosses between the scheduler and whoever runs a step: a Plan goes out, a Sampled comes back, Updates go on.

Rows are columns (parallel lists), because an object a row costs twice as much as the scheduling itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.core.request import Finish, Request


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. Row i computes `counts[i]` tokens of `requests[i]` from position `starts[i]`.

    `yields[i]` says how many of the row's last positions are sampled: 0 when the row stops short of the request's last
    token, 1 when it reaches it, 1 + k when k drafts follow. Block tables are the requests' own: read them before the
    next `schedule()`.

    Before anything is computed, whole blocks are moved: first every (block, host slot) of `swap_out`, then every (host
    slot, block) of `swap_in`, then every (source, target) of `copies`, in order. A block may be in more than one list:
    what goes out may make room for what comes in, and that may be copied. Within `swap_out` and within `swap_in` no
    target is named twice, so each may be carried out at once. All of it comes after the steps planned before.

    Then the encoder runs for the requests in `encodes`, which have a row in this plan, and fills their encoder groups.
    """

    step: int
    requests: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    yields: list[int] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    encodes: list[Request] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def filled_blocks(self) -> set[int]:
        """Blocks that hold what they should once the plan has been begun."""
        return {target for _, target in [*self.swap_in, *self.copies]}

    def computed_blocks(self, rows: Iterable[int], block_size: int) -> set[int]:
        """Blocks that these rows write to, those included that the encoder fills for them."""
        blocks: set[int] = set()
        for row in rows:
            request = self.requests[row]
            first, stop = self.starts[row] // block_size, -(-(self.starts[row] + self.counts[row]) // block_size)
            for table in request.tables:
                blocks.update(block for block in table[first:stop] if block is not None)
            if request in self.encodes:
                blocks.update(block for table in request.fixed_tables for block in table)
        return blocks


class TokenLogprobs(NamedTuple):
    """One position: the token that stands there and the likeliest ones, each as (token, logprob, rank from 1)."""

    chosen: tuple[int, float, int]
    top: list[tuple[int, float, int]]


class Candidates(NamedTuple):
    """What may follow a beam, and the likeliest tokens there, each as (token, logprob, rank from 1), best first."""

    tokens: list[tuple[int, float, int]]
    top: list[tuple[int, float, int]]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An answer that a beam search has found."""

    tokens: list[int]
    cum_logprob: float
    score: float  # cum_logprob with the length penalty
    finish: Finish
    logprobs: list[TokenLogprobs] | None = None


@dataclass(slots=True)
class Sampled:
    """What a step produced, a row each: the tokens after its last confirmed one (drafts kept, then one new).

    Log probabilities are there for the rows that asked. Those of a prompt are of the tokens at starts[row] + 1 up to
    the row's last position + 1, as far as the prompt goes. Beams get no tokens but candidates.
    """

    tokens: list[list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    candidates: dict[int, Candidates] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)  # rows for which no token could be chosen
    seconds: float | None = None  # that the step took, if it was measured


@dataclass(slots=True)
class Detail:
    """What few updates carry."""

    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached: int | None = None  # with the last update: prompt tokens that were found in the cache
    message: str = ""  # why, when the request ended with an error
    refused: bool = False  # with an error: the request's own parameters caused it
    beams: list[Hypothesis] | None = None  # with the last update of a beam search: its answers, the best first


@dataclass(slots=True)
class Update:
    """News of one request. Each request gets exactly one with `finish` set, and none after it."""

    id: str
    tokens: list[int]
    finish: Finish | None = None
    detail: Detail | None = None


def explain_no_token(request: Request) -> Detail:
    """Why no token could be chosen: what the request restricts leaves none, or the model computes no numbers."""
    if request.constraint is not None and request.constraint.error:
        return Detail(message=request.constraint.error, refused=True)
    if names := request.params.restrictions:
        return Detail(
            message=f"{' and '.join(names)} {'together leave' if len(names) > 1 else 'leaves'} no token that could "
            "come next. Loosen the restrictions.",
            refused=True,
        )
    return Detail(message="No token could be chosen: the model's logits are not numbers. Check the model's file.")
