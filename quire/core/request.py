"""Request: one sequence on its way through the scheduler, and nothing about text.

The scheduler owns it and never lets it leave the engine's process. There are no phases: `tokens` grow, `num_computed`
catches up with them, and a prompt chunk, a decoded token, drafts or a recomputation are all "the next tokens".
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from hashlib import blake2b
from typing import TYPE_CHECKING

from quire.core.constraint import Constraint, StopMatcher
from quire.core.params import SamplingParams

if TYPE_CHECKING:
    from quire.core.beam_group import Beam
    from quire.core.prefix_tree import Miss, Node
    from quire.core.swap import SwappedOut


NEVER = 1 << 62


class Finish(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class State(Enum):
    """Where the scheduler keeps a request."""

    NEW = "new"
    HELD = "held"  # a fork whose leader is still on the prompt
    WAITING = "waiting"
    RUNNING = "running"
    LEAVING = "leaving"  # preempted while a plan in flight still names its blocks
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """Tokens, how far the cache has caught up with them, and the blocks that hold it.

    output         tokens that the answer already has: of a request that another engine began
    tenant         on whose behalf; requests of one tenant queue behind each other, not behind those of all others
    constraint     what the answer must look like, and how far it has come
    num_computed   tokens whose k and v are confirmed in the cache
    num_planned    the same, plus those of plans still in flight; num_computed <= num_planned
    num_expected   sampled tokens that plans in flight will append to `tokens`
    capacity       tokens up to which positions from num_planned on may be written without asking the cache
    tables         a block table for each cache group that grows; an entry is None once its block fell behind the window
    fixed_tables   a block table for each encoder group, then for each state group: these do not grow
    encoder_tokens what an encoder reads before the first token is computed. The cache of the request's own tokens
                   depends on them, so they become part of its salt
    """

    id: str
    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    end_token_ids: frozenset[int] = frozenset()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    priority: int = 0
    salt: bytes = b""
    tenant: str = ""
    max_tokens: int = 16
    leader: Request | None = None  # the sample of the same prompt that computes it for this one
    output: Sequence[int] = ()
    num_scored: int = 0  # prompt tokens after the first whose logprobs are delivered
    constraint: Constraint | None = None
    encoder_tokens: Sequence[int] = ()
    stop_matcher: StopMatcher | None = None  # of a beam, if there are stop strings

    num_prompt: int = field(init=False)
    max_len: int = field(init=False)  # tokens it can ever have
    tokens: list[int] = field(init=False)
    drafts: list[int] = field(init=False, default_factory=list)
    num_computed: int = field(init=False, default=0)
    num_planned: int = field(init=False, default=0)
    num_expected: int = field(init=False, default=0)
    capacity: int = field(init=False, default=0)
    tables: list[list[int | None]] = field(init=False, default_factory=list)
    fixed_tables: list[list[int]] = field(init=False, default_factory=list)
    state: State = field(init=False, default=State.NEW)
    place: int = field(init=False, default=0)  # in the queue, fair between tenants
    rank: tuple[int, int] = field(init=False, default=(0, 0))
    arrival_s: float = field(init=False, default=0.0)
    stop_ids: frozenset[int] = field(init=False)
    processes_logits: bool = field(init=False)  # something is done to the model's logits before a token is chosen
    needs_tokens: bool = field(init=False)  # the host must know all tokens before the next one can be chosen
    argmax_only: bool = field(init=False)  # it is simply the likeliest one, and no more is asked
    forks: list[Request] = field(init=False, default_factory=list)
    num_in_flight: int = field(init=False, default=0)  # plans that name this request's blocks
    release_due: bool = field(init=False, default=False)  # give the blocks back when no plan names them
    node: Node | None = field(init=False, default=None)  # deepest published block
    publish_at: int = field(init=False, default=NEVER)  # computed tokens at which the next block can be published
    num_cached: int = field(init=False, default=0)  # prompt tokens found in the cache at the first admission
    num_preemptions: int = field(init=False, default=0)
    swapped_out: SwappedOut | None = field(init=False, default=None)  # while it waits: what of it lies on the host
    miss: Miss | None = field(init=False, default=None)
    beam: Beam | None = field(init=False, default=None)  # what it is in a beam search

    def __post_init__(self) -> None:
        self.tokens = [*self.prompt, *self.output]
        self.num_prompt = len(self.prompt)
        self.max_len = self.num_prompt + self.max_tokens
        stops = frozenset(self.params.stop_token_ids)
        self.stop_ids = stops if self.params.ignore_eos else stops | self.end_token_ids
        self.processes_logits = self.params.processes_logits or bool(self.bad_word_ids) or self.constraint is not None
        looks_back = self.constraint is not None or any(len(word) > 1 for word in self.bad_word_ids)
        self.needs_tokens = looks_back and not self.params.use_beam_search  # the host knows a beam's when it is planned
        self.argmax_only = self.params.argmax_only and not self.processes_logits
        if self.encoder_tokens:
            self.salt = blake2b(array("Q", self.encoder_tokens).tobytes() + self.salt, digest_size=16).digest()

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_rows(self) -> int:
        """How many rows of a step it may take: one for each beam."""
        return self.params.beam_width or 1

    def reset(self) -> None:
        """Back to a request that waits with its tokens and holds nothing of the cache."""
        self.state = State.WAITING
        self.num_computed = self.num_planned = self.num_expected = self.capacity = self.num_in_flight = 0
        self.tables, self.fixed_tables = [], []
        self.node, self.publish_at, self.swapped_out = None, NEVER, None
        self.release_due = False
        self.drafts.clear()
        self.forks.clear()

    def holds_any(self, blocks: set[int]) -> bool:
        return any(block in blocks for table in self.all_tables for block in table)

    @property
    def all_tables(self) -> list[Sequence[int | None]]:
        return [*self.tables, *self.fixed_tables]

    @property
    def finished(self) -> bool:
        return self.state is State.FINISHED
