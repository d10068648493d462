"""Request: one sequence as the scheduler sees it: tokens and blocks, no text.

The scheduler owns it, and it stays in the engine's process. There are no phases: `tokens` grows and `num_computed`
catches up with it. A prompt chunk, a decoded token, drafts and a recomputation are all "the next tokens".
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from hashlib import blake2b
from typing import TYPE_CHECKING

from quire.core.constraint import Constraint, StopMatcher
from quire.core.drafts import Drafts
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
    """A request's state in the scheduler."""

    NEW = "new"
    HELD = "held"  # a fork whose leader is still computing the prompt
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # its blocks are not released yet: a plan in flight uses them
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """Tokens, how many of them are computed, and the blocks that hold their keys and values.

    output         tokens of the answer that another engine has generated before this one took the request over
    tenant         the owner of the request; the queue is fair between tenants
    constraint     follows the answer and restricts its next token
    num_computed   tokens whose k and v are confirmed in the cache
    num_planned    num_computed plus the tokens of plans in flight
    num_expected   sampled tokens that plans in flight will append to `tokens`
    capacity       positions from num_planned up to this one may be written without `KVCache.grow`
    tables         a block table for each cache group that grows; an entry is None once its block is behind the window
    fixed_tables   a block table for each encoder group, then for each state group; these do not grow
    encoder_tokens the encoder's input, read before the first token is computed. The k and v of the request's own
                   tokens depend on it, so it becomes part of the salt
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
    leader: Request | None = None  # another sample of the same prompt, which computes the prompt for this one
    output: Sequence[int] = ()
    num_scored: int = 0  # prompt tokens after the first whose logprobs have been reported
    constraint: Constraint | None = None
    encoder_tokens: Sequence[int] = ()
    stop_matcher: StopMatcher | None = None  # for beams with stop strings
    prediction: Sequence[int] = ()  # tokens that the client expects as the answer
    submitted_s: float = 0.0  # when a server got it, of `time.monotonic`; 0 without one

    num_prompt: int = field(init=False)
    max_len: int = field(init=False)  # num_prompt + max_tokens
    tokens: list[int] = field(init=False)
    drafts: Drafts | None = field(init=False, default=None)  # to be verified by the next step
    num_drafts_in_flight: int = field(init=False, default=0)
    num_drafted: int = field(init=False, default=0)  # drafts that steps have verified
    num_accepted: int = field(init=False, default=0)  # those that were right
    num_exited: int = field(init=False, default=0)  # tokens that an exit has chosen
    waits_from: int | None = field(init=False, default=None)  # position from which tokens that exited are not computed
    num_computed: int = field(init=False, default=0)
    num_planned: int = field(init=False, default=0)
    num_expected: int = field(init=False, default=0)
    capacity: int = field(init=False, default=0)
    tables: list[list[int | None]] = field(init=False, default_factory=list)
    fixed_tables: list[list[int]] = field(init=False, default_factory=list)
    state: State = field(init=False, default=State.NEW)
    queue_position: int = field(init=False, default=0)  # see FairQueue
    sort_key: tuple[int, int] = field(init=False, default=(0, 0))  # from queue position and priority, then by arrival
    arrival_s: float = field(init=False, default=0.0)
    stop_ids: frozenset[int] = field(init=False)
    processes_logits: bool = field(init=False)  # logits are changed before a token is chosen
    needs_tokens: bool = field(init=False)  # a token can be chosen only after the one before is committed
    argmax_only: bool = field(init=False)  # the next token is the argmax, and no logprobs are needed
    forks: list[Request] = field(init=False, default_factory=list)
    num_in_flight: int = field(init=False, default=0)  # plans in flight that have a row of this request
    release_due: bool = field(init=False, default=False)  # release the blocks when num_in_flight is 0
    node: Node | None = field(init=False, default=None)  # its next block is published below this one
    publish_at: int = field(init=False, default=NEVER)  # number of tokens at which the next block is full
    num_cached: int = field(init=False, default=0)  # prompt tokens found in the cache at the first admission
    num_preemptions: int = field(init=False, default=0)
    swapped_out: SwappedOut | None = field(init=False, default=None)  # its host blocks while it waits
    miss: Miss | None = field(init=False, default=None)
    beam: Beam | None = field(init=False, default=None)  # its state in a beam search

    def __post_init__(self) -> None:
        self.tokens = [*self.prompt, *self.output]
        self.num_prompt = len(self.prompt)
        self.max_len = self.num_prompt + self.max_tokens
        stops = frozenset(self.params.stop_token_ids)
        self.stop_ids = stops if self.params.ignore_eos else stops | self.end_token_ids
        self.processes_logits = self.params.processes_logits or bool(self.bad_word_ids) or self.constraint is not None
        looks_back = self.constraint is not None or any(len(word) > 1 for word in self.bad_word_ids)
        self.needs_tokens = looks_back and not self.params.use_beam_search  # beams are planned after a commit
        self.argmax_only = self.params.argmax_only and not self.processes_logits
        if self.encoder_tokens:
            self.salt = blake2b(array("Q", self.encoder_tokens).tobytes() + self.salt, digest_size=16).digest()

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_waiting(self) -> int:
        """Tokens before the last one that exited early: a step computes them with it, or none of them. Tokens that are
        computed again after a preemption are a backlog as a prompt's are, and do not count."""
        if self.waits_from is None:
            return 0
        return max(0, len(self.tokens) + self.num_expected - self.num_planned - 1)

    @property
    def num_rows(self) -> int:
        """The most rows that it has in a step: one for each beam."""
        return self.params.beam_width or 1

    def reset(self) -> None:
        """Return to the waiting state. The request keeps its tokens and holds no blocks."""
        self.state = State.WAITING
        self.num_computed = self.num_planned = self.num_expected = self.capacity = self.num_in_flight = 0
        self.tables, self.fixed_tables = [], []
        self.node, self.publish_at, self.swapped_out = None, NEVER, None
        self.release_due = False
        self.waits_from = None
        self.drafts = None
        self.num_drafts_in_flight = 0
        self.forks.clear()

    def holds_any(self, blocks: set[int]) -> bool:
        return any(block in blocks for table in self.all_tables for block in table)

    @property
    def all_tables(self) -> list[Sequence[int | None]]:
        return [*self.tables, *self.fixed_tables]

    @property
    def finished(self) -> bool:
        return self.state is State.FINISHED
