"""Explainer: why each waiting request waits, by the conditions under which the scheduler would admit it now.

`explain` repeats the admission of the next step without changing anything. It returns numbers; `describe_wait` makes
the sentence of them, in whatever process shows it. `engine/view.py` calls the first, the server the second.
"""

from __future__ import annotations

from bisect import bisect, insort
from copy import deepcopy
from dataclasses import dataclass, field, replace
from enum import StrEnum

from quire.core.policy import Hold
from quire.core.prefix_tree import Match
from quire.core.request import Request, State
from quire.core.scheduler import Scheduler

MAX_LOOKUPS = 32  # requests at the head of the line whose blocks are counted with what the prefix tree has of them


class Resource(StrEnum):
    """What a request waits for. `STEP`: the next step admits it."""

    ROWS = "rows"
    BLOCKS = "blocks"
    TOKENS = "tokens"
    BATCHING = "batching"
    LEADER = "leader"
    ORDER = "order"
    PLAN = "plan"
    STEP = "step"


@dataclass(slots=True)
class Room:
    """What the next step has for waiting requests."""

    num_running: int = 0  # rows of running requests; each beam has one
    max_requests: int = 0
    num_rows: int = 0
    num_tokens: int = 0
    num_running_tokens: int = 0  # of the step, for running requests
    num_free_blocks: int = 0
    num_reserved_blocks: int = 0  # of those, what running requests need for the tokens they have
    num_admissible: int = 0  # requests that the batching policy admits
    hold: Hold = field(default_factory=Hold)  # why it admits none


@dataclass(slots=True)
class Wait:
    """Why one request waits. `resources` has all that keeps it from the next step, what is its own first."""

    position: int | None = None  # in line, from 1; None if it is not in line
    num_admitted: int = 0  # requests before it in line that the next step admits, and which leave no room for it
    num_overtaking: int = 0  # requests before it in line that arrived later
    resources: list[Resource] = field(default_factory=list)
    num_rows: int = 1  # that it needs
    num_blocks: int | None = None  # that it needs, if they were counted
    num_available_blocks: int = 0
    num_leader_tokens: int = 0  # of the prompt, which its leader has not computed


class Explainer:
    """Keeps the prefix matches of waiting requests, since a look-up takes milliseconds for a long prompt."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._matches: dict[Request, Match] = {}

    def room(self, now_s: float) -> Room:
        """What the next step has, if it is made at `now_s`."""
        scheduler, policy = self._scheduler, self._scheduler.policy.batching
        num_running, num_waiting = len(scheduler.running), scheduler.num_waiting
        preview = scheduler.preview()
        return Room(
            num_running=num_running,
            max_requests=scheduler.max_requests,
            num_rows=scheduler.count_free_rows(),
            num_tokens=preview.num_tokens,
            num_running_tokens=preview.num_running_tokens,
            num_free_blocks=scheduler.kv.pool.num_free,
            num_reserved_blocks=preview.num_reserved_blocks,
            num_admissible=deepcopy(policy).quota(num_waiting, num_running, lambda: scheduler.oldest_wait_s(now_s)),
            hold=policy.explain(num_waiting, num_running, lambda: scheduler.oldest_wait_s(now_s)),
        )

    def explain(self, room: Room, limit: int) -> dict[Request, Wait]:
        """The first `limit` requests in line, in order, and then at most as many that are not in line."""
        waits = self._explain_line(room, self._scheduler.waiting_requests(limit))
        for request in self._scheduler.unqueued_requests()[:limit]:
            waits[request] = explain_unqueued(request)
        return waits

    def _explain_line(self, room: Room, line: list[Request]) -> dict[Request, Wait]:
        """Admit in order, as the scheduler does. Behind the first that stays, each is judged as the first would be."""
        waits: dict[Request, Wait] = {}
        numbers: list[int] = []  # of those before, sorted
        known, self._matches = self._matches, {}
        left, is_stopped = replace(room), False
        for index, request in enumerate(line):
            number = request.sort_key[1]
            wait = Wait(index + 1, num_overtaking=index - bisect(numbers, number), num_rows=request.num_rows)
            insort(numbers, number)
            if index < MAX_LOOKUPS:
                self._count_blocks(request, wait, left, known.get(request))
            wait.resources = find_limits(wait, left)
            if is_stopped:
                wait.resources.append(Resource.ORDER)
            elif wait.resources:
                wait.num_admitted = index
                left, is_stopped = room, True
            else:
                wait.resources.append(Resource.STEP)
                self._take(request, wait, left)
            waits[request] = wait
        return waits

    def _count_blocks(self, request: Request, wait: Wait, left: Room, known: Match | None) -> None:
        """What the request needs. A match that has not grown is not looked up again."""
        scheduler, kv = self._scheduler, self._scheduler.kv
        headroom = 1 if left.num_rows < scheduler.count_free_rows() and not scheduler.running else 0
        available = scheduler.count_available_blocks(request, left.num_reserved_blocks) - headroom
        wait.num_available_blocks = available + scheduler.count_draft_blocks()
        if not request.num_output and len(kv.windows) <= available and kv.can_fork(request):
            wait.num_blocks = len(kv.windows)
            return
        wait.num_blocks = kv.peak(len(request.tokens), scheduler.max_tokens_per_step, len(request.encoder_tokens))
        if wait.num_blocks > wait.num_available_blocks:
            match = self._matches[request] = self._look_up(request, known)
            wait.num_blocks = kv.num_blocks_to_admit(request, match, scheduler.max_tokens_per_step)

    def _look_up(self, request: Request, known: Match | None) -> Match:
        kv = self._scheduler.kv
        return kv.lookup(request) if known is None or kv.tree.has_grown(known, request.salt) else known

    def _take(self, request: Request, wait: Wait, left: Room) -> None:
        """The next step admits the request: those behind it have less room."""
        kv = self._scheduler.kv
        num_found = request.swapped_out.num_computed if request.swapped_out is not None else 0
        if not request.num_output and kv.can_fork(request):
            num_found = request.num_prompt - 1
        else:
            match = self._matches[request] = self._look_up(request, self._matches.get(request))
            num_found = max(num_found, len(match.path) * kv.block_size + match.num_partial)
        left.num_rows -= request.num_rows
        left.num_admissible -= 1
        left.num_tokens -= min(left.num_tokens, len(request.tokens) - num_found)
        left.num_reserved_blocks += wait.num_blocks or 0


def find_limits(wait: Wait, room: Room) -> list[Resource]:
    """What keeps the first in line from the next step."""
    limits = {
        Resource.BATCHING: room.num_admissible <= 0,
        Resource.ROWS: wait.num_rows > room.num_rows,
        Resource.TOKENS: room.num_tokens <= 0,
        Resource.BLOCKS: (wait.num_blocks or 0) > wait.num_available_blocks,
    }
    return [resource for resource, is_short in limits.items() if is_short]


def explain_unqueued(request: Request) -> Wait:
    """Of a request that is neither running nor in line."""
    if request.state is State.HELD and request.leader is not None:
        left = max(0, request.leader.num_prompt - 1 - request.leader.num_computed)
        return Wait(resources=[Resource.LEADER], num_leader_tokens=left)
    return Wait(resources=[Resource.PLAN])


def describe_wait(wait: Wait, room: Room) -> str:
    """The sentence, with numbers. It names no other request."""
    reasons = [describe_resource(resource, wait, room) for resource in wait.resources]
    if wait.num_admitted:
        reasons.append(f"the next step admits {wait.num_admitted:,} before it")
    text = "; ".join(reasons)
    return f"{ordinal(wait.position)} in line: {text}." if wait.position else f"{text[0].upper()}{text[1:]}."


def describe_resource(resource: Resource, wait: Wait, room: Room) -> str:
    match resource:
        case Resource.ROWS:
            needs = f", and it needs {wait.num_rows} rows for its beams" if wait.num_rows > 1 else ""
            return f"{room.num_running:,} of {room.max_requests:,} requests run{needs}"
        case Resource.BLOCKS:
            reserved = f" ({room.num_reserved_blocks:,} for running requests)" if room.num_reserved_blocks else ""
            return (
                f"it needs {wait.num_blocks:,} blocks of the cache, {room.num_free_blocks:,} are free{reserved}, "
                f"and it may use {max(0, wait.num_available_blocks):,}"
            )
        case Resource.TOKENS:
            return f"the next step has no tokens left for it, {room.num_running_tokens:,} are for running requests"
        case Resource.BATCHING:
            return room.hold.reason or "the batching policy has no place left for it"
        case Resource.LEADER:
            return f"it shares a prompt, of which another answer has {wait.num_leader_tokens:,} tokens left to compute"
        case Resource.PLAN:
            return "it was preempted, and a step in flight still uses its blocks"
        case Resource.STEP:
            return "the next step admits it"
        case Resource.ORDER:
            return describe_order(wait)


def describe_order(wait: Wait) -> str:
    num_before = (wait.position or 1) - 1
    text = "1 request goes first" if num_before == 1 else f"{num_before:,} requests go first"
    if not wait.num_overtaking:
        return text
    later = "it" if num_before == 1 else "all" if num_before == wait.num_overtaking else f"{wait.num_overtaking:,}"
    return f"{text} ({later} arrived later: by priority, or because the queue is fair between tenants)"


def ordinal(number: int) -> str:
    if number == 1:
        return "First"
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{suffix}"
