"""The scheduler's inputs and outputs: `schedule` returns a Plan, the runner returns Sampled, `commit` returns Updates.

Rows are stored as columns (parallel lists): an object for each row would cost twice as much as the scheduling itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.core.drafts import Drafts
from quire.core.request import Finish, Request


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. Row i computes `counts[i]` tokens of `requests[i]` from position `starts[i]`.

    `yields[i]` is the number of the row's last positions that are sampled: 0 when the row ends before the request's
    last token, 1 when it ends there, 1 + k when k drafts follow. `drafts[i]` holds these, if there are any. Then the
    row begins with the request's last token, and node n of a tree has the slot of position starts[i] + 1 + n. Block
    tables are those of the requests. They must be read before the next `schedule()`.

    Before the model runs, whole blocks are copied, after all steps planned before: first every (block, host block) of
    `swap_out`, then every (host block, block) of `swap_in`, then every (source, target) of `copies`, in order. A block
    may be in more than one list: one that is swapped out may be the target of a swap-in, and that may be the source of
    a copy. The targets within `swap_out` differ, and so do those within `swap_in`, so each list may be copied at once.

    Then the encoder runs for the requests in `encodes`, which have a row in this plan, and fills their encoder groups.

    Behind the step the device makes `drafted[row]` drafts for a row, for the next plan.
    """

    step: int
    requests: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    yields: list[int] = field(default_factory=list)
    drafts: dict[int, Drafts] = field(default_factory=dict)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    encodes: list[Request] = field(default_factory=list)
    drafted: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def filled_blocks(self) -> set[int]:
        """Blocks that the plan's swap-ins and copies fill."""
        return {target for _, target in [*self.swap_in, *self.copies]}

    def computed_blocks(self, rows: Iterable[int], block_size: int) -> set[int]:
        """Blocks that these rows write to, and those that the encoder fills for them."""
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
    """One position: its token and the likeliest tokens, each as (token, logprob, rank from 1)."""

    chosen: tuple[int, float, int]
    top: list[tuple[int, float, int]]


class Candidates(NamedTuple):
    """The allowed next tokens of a beam, and the likeliest ones, each as (token, logprob, rank from 1), best first."""

    tokens: list[tuple[int, float, int]]
    top: list[tuple[int, float, int]]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished answer of a beam search."""

    tokens: list[int]
    cum_logprob: float
    score: float  # cum_logprob with the length penalty
    finish: Finish
    logprobs: list[TokenLogprobs] | None = None


@dataclass(slots=True)
class Sampled:
    """What a step produced. `tokens` has a list for each row: the accepted drafts, then one new token.

    The dicts are indexed by row and have the rows whose requests need them. A row's prompt log probabilities are those
    of the prompt tokens from position starts[row] + 1 to the row's last position + 1. Beams have candidates instead of
    tokens.
    """

    tokens: list[list[int]]
    accepted: dict[int, list[int]] = field(default_factory=dict)  # rows with drafts: the accepted nodes, in order
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    candidates: dict[int, Candidates] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)  # rows for which no token could be chosen
    exited: dict[int, int] = field(default_factory=dict)  # rows whose token is an exit's: tokens computed in all layers
    seconds: float | None = None  # duration of the step, if it was measured


@dataclass(slots=True)
class Detail:
    """What an update carries besides tokens. Few updates have it."""

    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached: int | None = None  # with the last update: cached prompt tokens
    num_drafted: int = 0  # with the last update: drafts that steps have verified
    num_accepted: int = 0  # with the last update: those that were right
    num_exited: int = 0  # of the update's tokens, those that an exit has chosen
    message: str = ""  # the error, if the request ended with one
    refused: bool = False  # with an error: the request's own parameters caused it
    beams: list[Hypothesis] | None = None  # with the last update of a beam search: its answers, the best first


@dataclass(slots=True)
class Update:
    """New tokens of one request. Each request gets exactly one update with `finish` set, and none after it."""

    id: str
    tokens: list[int]
    finish: Finish | None = None
    detail: Detail | None = None


def explain_no_token(request: Request) -> Detail:
    """Why no token could be chosen: the request's restrictions leave none, or the logits are not numbers."""
    if request.constraint is not None and request.constraint.error:
        return Detail(message=request.constraint.error, refused=True)
    if names := request.params.restrictions:
        return Detail(
            message=f"{' and '.join(names)} {'together leave' if len(names) > 1 else 'leaves'} no token that could "
            "come next. Loosen the restrictions.",
            refused=True,
        )
    return Detail(message="No token could be chosen: the model's logits are not numbers. Check the model's file.")
