"""Recording: requests and steps, put together from a recording's lines. `reader.py` makes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.trace.format import (
    PROMPT_BLOCK,
    Arrival,
    Close,
    End,
    EngineStart,
    Header,
    Line,
    Reset,
    Restart,
    Resume,
    Step,
)

MAX_OUTPUT = 1 << 26


@dataclass(slots=True)
class RecordedRequest:
    """One request and its answer. An anonymous recording has lengths instead of tokens."""

    id: str
    name: str
    replica: int  # that got it first
    at: float
    seed: int
    leader: str | None
    tenant: str
    priority: int
    max_tokens: int
    num_prompt: int
    prompt: list[int] | None
    blocks: list[str] | None
    params: dict[str, Any]
    end_token_ids: list[int]
    bad_word_ids: list[list[int]]
    prediction: list[int]
    tokens: list[int] = field(default_factory=list)
    num_output: int = 0
    token_steps: list[int | None] = field(default_factory=list)  # of each token: index into Recording.steps, if known
    end: End | None = None  # None: it was running when the recording ended

    @property
    def answers(self) -> list[list[int]]:
        """Its tokens; of a beam search all of its answers."""
        return self.end.beams if self.end is not None and self.end.beams is not None else [self.tokens]

    @property
    def was_cut(self) -> bool:
        """Whether something from outside ended the answer: what would have followed is not known."""
        return self.end is None or self.end.finish in ("abort", "error")


@dataclass(slots=True)
class Recording:
    """Requests in their order of arrival in the engines, and steps in their order of commit."""

    name: str  # of the file, for messages
    header: Header
    engines: list[EngineStart] = field(default_factory=list)
    requests: dict[str, RecordedRequest] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    resets: list[Reset] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    num_resumed: int = 0
    num_output: int = 0  # tokens of all answers
    is_closed: bool = False  # the server was stopped; otherwise it was killed, or is still running

    @property
    def engine(self) -> EngineStart | None:
        """The first engine; its options are those of all."""
        return self.engines[0] if self.engines else None

    def add(self, line: Line) -> None:
        """Raises ValueError for a line that does not fit those before it."""
        match line:
            case Step():
                self._add_step(line)
            case Arrival():
                self._add_request(line)
            case End():
                self._find(line.id).end = line
            case Resume():
                self._resume(line)
            case EngineStart():
                self.engines.append(line)
            case Reset():
                self.resets.append(line)
            case Restart():
                self.restarts.append(line)
            case Close():
                self.is_closed = True
            case Header():
                raise ValueError("a second header")

    def _find(self, request_id: str) -> RecordedRequest:
        if request_id not in self.requests:
            raise ValueError(f"no request {request_id!r} has arrived")
        return self.requests[request_id]

    def _add_request(self, line: Arrival) -> None:
        """A second arrival comes from another engine, which took the request over before it had a token."""
        if line.id in self.requests:
            self.num_resumed += 1
        elif line.leader is not None:
            leader = self._find(line.leader)
            self.requests[line.id] = replace(
                leader, id=line.id, name=line.name, replica=line.replica, at=line.at, seed=line.seed,
                leader=line.leader, tokens=[], num_output=0, token_steps=[], end=None,
            )  # fmt: skip
        else:
            self.requests[line.id] = make_request(line)

    def _resume(self, line: Resume) -> None:
        """The tokens that it resumes with are those that its client has."""
        request = self._find(line.id)
        self.num_resumed += 1
        tokens = line.output or []
        num_output = len(tokens) or line.num_output
        self._allow(num_output - request.num_output)
        request.tokens, request.num_output = tokens, num_output
        known = request.token_steps[: request.num_output]
        request.token_steps = known + [None] * (request.num_output - len(known))

    def _add_step(self, line: Step) -> None:
        columns = (line.requests, line.starts, line.counts, line.yields)
        if len({len(column) for column in columns}) != 1:
            raise ValueError("the columns of the step differ in length")
        number = len(self.steps)
        self.steps.append(line)
        for request_id, tokens in line.tokens.items():
            self._find(request_id).tokens += tokens
            self._count(request_id, len(tokens), number)
        for request_id, count in line.num_tokens.items():
            self._count(request_id, count, number)

    def _count(self, request_id: str, count: int, step: int) -> None:
        request = self._find(request_id)
        self._allow(count)
        request.num_output += count
        request.token_steps += [step] * count

    def _allow(self, count: int) -> None:
        """A line of a few bytes may name any number of tokens."""
        self.num_output += count
        if self.num_output > MAX_OUTPUT:
            raise ValueError(f"the answers have more than {MAX_OUTPUT:,} tokens, the most that are read")


def make_request(line: Arrival) -> RecordedRequest:
    if (line.prompt is None) == (line.blocks is None):
        raise ValueError("the request has neither a prompt nor digests of one, or both")
    if not (line.prompt or line.num_prompt):
        raise ValueError("an empty prompt")
    if line.blocks is not None and len(line.blocks) != -(-line.num_prompt // PROMPT_BLOCK):
        raise ValueError(f"{len(line.blocks)} digests for a prompt of {line.num_prompt} tokens")
    return RecordedRequest(
        id=line.id,
        name=line.name,
        replica=line.replica,
        at=line.at,
        seed=line.seed,
        leader=None,
        tenant=line.tenant,
        priority=line.priority,
        max_tokens=line.max_tokens,
        num_prompt=line.num_prompt if line.prompt is None else len(line.prompt),
        prompt=line.prompt,
        blocks=line.blocks,
        params=line.params,
        end_token_ids=line.end_token_ids,
        bad_word_ids=line.bad_word_ids,
        prediction=line.prediction,
    )


def groups(recording: Recording) -> list[list[RecordedRequest]]:
    """Requests that answer one prompt: the leader, then the others."""
    found: dict[str, list[RecordedRequest]] = {}
    for request in recording.requests.values():
        found.setdefault(request.leader or request.id, []).append(request)
    return list(found.values())


def by_arrival(requests: Sequence[RecordedRequest]) -> list[RecordedRequest]:
    return sorted(requests, key=lambda request: request.at)
