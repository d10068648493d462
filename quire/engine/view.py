"""EngineView: an observer that collects what changes in an engine, for whoever watches it. `process.py` attaches it.

Callbacks only take notes; `take_changes`, at most ten times a second, makes the message. What a view costs is part of a
step's time, so a row of a step costs a dictionary look-up here, and block tables are read only where blocks changed.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.core.explain import Explainer, Wait
from quire.core.plan import Plan, Sampled, Update
from quire.core.request import Request, State
from quire.core.scheduler import Scheduler
from quire.engine.live_changes import (
    EndedRequest,
    EngineFacts,
    Event,
    LiveChanges,
    MissReason,
    RequestRow,
    StepRow,
    make_runs,
)
from quire.engine.observer import Observer

if TYPE_CHECKING:
    from quire.engine.engine import Engine

MAX_WAITING_ROWS = 128  # waiting requests that have a row
MAX_STEPS = 256  # of one message
TAIL = 8  # blocks at the end of a block table, where new ones are
FREE, CACHED, IN_USE, SHARED = range(4)  # states of a block


@dataclass(slots=True)
class Tracked:
    """A request, and what has happened to it since the last message."""

    request: Request
    queued_s: float | None  # since when it waits; None once a step has computed it
    events: list[Event] = field(default_factory=list)
    num_preemptions: int = 0
    num_swapped_blocks: int = 0


@dataclass(slots=True)
class PlannedStep:
    """What is known of a step before it runs."""

    plan: Plan
    predicted_s: float | None
    num_admitted: int
    num_preempted: int


class EngineView(Observer):
    """Follows one engine. `detach` ends it."""

    def __init__(
        self, engine: Engine, interval_s: float, predict: Callable[[Plan], float | None] = lambda plan: None
    ) -> None:
        """`predict` gives the seconds of a step. Where it gives none, the engine's own averages do."""
        self._engine = engine
        self._predict = predict
        self._interval_s = interval_s
        self._scheduler: Scheduler = engine.scheduler
        self._explainer = Explainer(engine.scheduler)
        self._unix_s = time.time() - time.monotonic()  # of the monotonic clock's zero
        self._tracked: dict[str, Tracked] = {}
        self._steps: deque[StepRow] = deque(maxlen=MAX_STEPS)
        self._planned: dict[int, PlannedStep] = {}  # plans in flight, by step
        self._ended: list[EndedRequest] = []
        self._events: dict[int, list[Event]] = {}  # of requests that have ended, by number
        self._shown: dict[str, RequestRow] = {}  # the rows of the last message, by id
        self._pool = engine.scheduler.kv.pool
        self._owners = array("I")
        self._num_preemptions = self._scheduler.counters.preemptions
        self._num_swaps = self._scheduler.counters.swaps
        self._last_end_s = 0.0  # of the last step
        self._sent_s = 0.0
        self._needs_snapshot = True
        self._has_changed = True
        for request in self._scheduler.requests.values():
            waits = request.state is not State.RUNNING
            tracked = Tracked(request, request.arrival_s if waits else None)
            tracked.num_preemptions = request.num_preemptions
            tracked.num_swapped_blocks = count_swapped(request)
            self._tracked[request.id] = tracked
        self._pool.changed = set()
        engine.observers.append(self)

    def detach(self) -> None:
        self._scheduler.kv.pool.changed = None
        if self in self._engine.observers:
            self._engine.observers.remove(self)

    def due_in_s(self) -> float | None:
        """Seconds until the next message is due; None while nothing has changed."""
        return max(0.0, self._sent_s + self._interval_s - time.monotonic()) if self._has_changed else None

    # ── what the engine calls ─────────────────────────────────────────────────────────────────────────────────────────

    def on_add(self, request: Request, now_s: float) -> None:
        self._has_changed = True
        self._tracked[request.id] = Tracked(request, now_s)

    def on_abort(self, request_id: str) -> None:
        self._end(request_id, "abort")

    def on_plan(self, plan: Plan) -> None:
        now_s, counters = time.monotonic(), self._scheduler.counters
        num_preempted, self._num_preemptions = counters.preemptions - self._num_preemptions, counters.preemptions
        num_swapped, self._num_swaps = counters.swaps - self._num_swaps, counters.swaps
        if num_preempted or num_swapped:
            self._note_preemptions(now_s)
        num_admitted = 0
        for request in plan.requests:
            tracked = self._tracked.get(request.id)
            if tracked is not None and tracked.queued_s is not None:
                num_admitted += 1
                self._note_admission(tracked, now_s)
        predicted_s = self._predict(plan) or self._engine.costs.predict(plan)
        self._planned[plan.step] = PlannedStep(plan, predicted_s, num_admitted, num_preempted)

    def on_commit(self, plan: Plan, sampled: Sampled, updates: Sequence[Update], launched_s: float) -> None:
        end_s = time.monotonic()
        start_s = max(launched_s, self._last_end_s) + self._unix_s  # on a GPU it is launched behind the one before
        self._last_end_s = end_s
        self._add_step(plan, start_s, sampled.seconds, failed=False)
        self._note_rows(plan, start_s, end_s + self._unix_s)
        self._end_all(updates)

    def on_fail(self, plan: Plan, updates: Sequence[Update]) -> None:
        self._add_step(plan, time.monotonic() + self._unix_s, None, failed=True)
        self._end_all(updates)

    def on_reset(self, updates: Sequence[Update]) -> None:
        self._planned.clear()
        self._note_preemptions(time.monotonic())
        self._end_all(updates)

    # ── notes ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _note_admission(self, tracked: Tracked, now_s: float) -> None:
        assert tracked.queued_s is not None
        moment_s = now_s + self._unix_s
        tracked.events.append(Event("queued", tracked.queued_s + self._unix_s, moment_s))
        tracked.queued_s = None
        if tracked.num_swapped_blocks:
            tracked.events.append(Event("swapped_in", moment_s, moment_s, amount=tracked.num_swapped_blocks))
            tracked.num_swapped_blocks = 0

    def _note_preemptions(self, now_s: float) -> None:
        moment_s = now_s + self._unix_s
        for tracked in self._tracked.values():
            request = tracked.request
            if request.num_preemptions > tracked.num_preemptions:
                tracked.num_preemptions = request.num_preemptions
                tracked.events.append(Event("preempted", moment_s, moment_s))
                tracked.queued_s = now_s
            if not tracked.num_swapped_blocks and (num_blocks := count_swapped(request)):
                tracked.num_swapped_blocks = num_blocks
                tracked.events.append(Event("swapped_out", moment_s, moment_s, amount=num_blocks))

    def _note_rows(self, plan: Plan, start_s: float, end_s: float) -> None:
        """Consecutive steps that decode are one event."""
        step = plan.step
        for row, (request, count) in enumerate(zip(plan.requests, plan.counts, strict=True)):
            tracked = self._tracked.get(request.id)
            if tracked is None:
                continue
            kind = "draft" if row in plan.drafts else "prompt" if count > 1 else "decode"
            last = tracked.events[-1] if tracked.events else None
            if last is not None and last.kind == kind != "prompt":
                last.end_s = end_s
                last.num_steps += last.step != step  # beams have several rows in a step
                last.amount += count
            else:
                tracked.events.append(Event(kind, start_s, end_s, step, 1, count))

    def _add_step(self, plan: Plan, start_s: float, seconds: float | None, *, failed: bool) -> None:
        self._has_changed = True
        planned = self._planned.pop(plan.step, None) or PlannedStep(plan, None, 0, 0)
        prompts = [count for row, count in enumerate(plan.counts) if count > 1 and row not in plan.drafts]
        num_drafts = sum(map(len, plan.drafts.values()))
        self._steps.append(
            StepRow(
                plan.step, start_s, seconds, planned.predicted_s, failed, len(prompts), sum(prompts),
                len(plan) - len(prompts) - len(plan.drafts), len(plan.drafts), num_drafts,
                planned.num_admitted, planned.num_preempted,
            )
        )  # fmt: skip

    def _end_all(self, updates: Sequence[Update]) -> None:
        self._has_changed = True
        for update in updates:
            if update.finish:
                self._end(update.id, update.finish.value)

    def _end(self, request_id: str, finish: str) -> None:
        self._has_changed = True
        if tracked := self._tracked.pop(request_id, None):
            row = self._make_row(tracked, None)
            self._ended.append(EndedRequest(row, finish))
            self._take_events(tracked, row.number)

    # ── the message ───────────────────────────────────────────────────────────────────────────────────────────────────

    def take_changes(self) -> LiveChanges:
        """What has changed since the last call."""
        scheduler = self._scheduler
        now_s = self._sent_s = time.monotonic()
        is_snapshot = self._needs_snapshot or scheduler.kv.pool is not self._pool
        room = self._explainer.room(now_s)
        changes = LiveChanges(
            sent_s=now_s + self._unix_s,
            blocks=self._take_blocks(is_snapshot),
            requests=[],
            ended=self._ended,
            events=self._events,
            steps=list(self._steps),
            room=room,
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_free_blocks=scheduler.kv.pool.num_free,
            decode_s=scheduler.pace.decode_s,
            prompt_token_s=scheduler.pace.token_s,
            facts=self._facts() if is_snapshot else None,
        )
        self._steps.clear()
        self._add_rows(changes, self._explainer.explain(room, MAX_WAITING_ROWS), is_snapshot)
        self._ended, self._events = [], {}
        self._needs_snapshot = self._has_changed = False
        return changes

    def _add_rows(self, changes: LiveChanges, waits: dict[Request, Wait], is_snapshot: bool) -> None:
        running = [request for request in self._scheduler.running if not is_further_beam(request)]
        shown, self._shown = self._shown, {}
        for request in (*running, *waits):
            tracked = self._tracked.get(request.id)
            if tracked is None:
                continue
            wait, before = waits.get(request), shown.get(request.id)
            still_waits = before is not None and wait is not None and before.wait == wait and not tracked.events
            if before is None or not still_waits or before.num_swapped_blocks != count_swapped(request):
                row = self._make_row(tracked, wait)
            else:
                row = before
            self._shown[request.id] = row
            if is_snapshot or row != before:
                changes.requests.append(row)
            self._take_events(tracked, row.number)
        for request_id in shown.keys() - self._shown.keys():
            if request_id in self._tracked:  # others have gone before it
                changes.ended.append(EndedRequest(shown[request_id], None))

    def _take_events(self, tracked: Tracked, number: int) -> None:
        if tracked.events:
            self._events[number] = tracked.events
            tracked.events = []

    def _make_row(self, tracked: Tracked, wait: Wait | None) -> RequestRow:
        request = tracked.request
        beams: Iterable[Request] = (request,) if request.beam is None else request.beam.group.beams
        num_blocks = sum(len(table) for beam in beams for table in beam.all_tables)
        if self._scheduler.kv.has_windows:
            num_blocks -= sum(table.count(None) for beam in beams for table in beam.tables)
        miss = request.miss
        return RequestRow(
            request.sort_key[1] + 1,
            request.id,
            request.tenant,
            request.state.value,
            request.arrival_s + self._unix_s,
            request.num_prompt,
            request.num_cached,
            request.num_computed,
            request.num_output,
            request.max_tokens,
            num_blocks,
            count_swapped(request),
            request.num_preemptions,
            request.num_drafted,
            request.num_accepted,
            1 if request.beam is None else len(request.beam.group.beams),
            wait,
            MissReason(miss.kind.value, miss.token, miss.step) if miss is not None else None,
        )

    def _facts(self) -> EngineFacts:
        scheduler = self._scheduler
        batching = type(scheduler.policy.batching).__name__.lower()
        return EngineFacts(
            scheduler.kv.pool.num_blocks, scheduler.kv.block_size, scheduler.max_requests,
            scheduler.max_tokens_per_step, batching, self._engine.info.device,
        )  # fmt: skip

    # ── blocks ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _take_blocks(self, is_snapshot: bool) -> list[int]:
        """Runs of the blocks that have changed, or of all."""
        kv = self._scheduler.kv
        self._pool = kv.pool
        changed, self._pool.changed = self._pool.changed, set()
        if is_snapshot or changed is None:
            blocks: Sequence[int] = range(1, kv.pool.num_blocks + 1)
            self._owners = array("I", bytes(4 * (kv.pool.num_blocks + 1)))
        else:
            blocks = sorted(changed)
        refs, published = kv.pool.refs, kv.tree.owners
        self._find_owners({block for block in blocks if refs[block]})
        states = [
            min(IN_USE - 1 + refs[block], SHARED) if refs[block] else CACHED if block in published else FREE
            for block in blocks
        ]
        owners = [self._owners[block] if refs[block] else 0 for block in blocks]
        return make_runs(blocks, states, owners)

    def _find_owners(self, used: set[int]) -> None:
        """Most blocks are new and at the end of a table, so the ends are searched first, then whole tables."""
        for length in (TAIL, self._pool.num_blocks):
            for request in self._holders():
                if not used:
                    return
                number = request.sort_key[1] + 1
                for table in request.all_tables:
                    found = used.intersection(table[-length:])
                    used -= found
                    for block in found:
                        self._owners[block] = number

    def _holders(self) -> Iterator[Request]:
        """Requests that hold blocks. Those that have ended hold theirs until the plan in flight is committed."""
        yield from self._scheduler.running
        yield from self._scheduler.unqueued_requests()
        for planned in self._planned.values():
            yield from planned.plan.requests


def is_further_beam(request: Request) -> bool:
    """Whether it is a beam of another request."""
    return request.beam is not None and request.beam.group.root is not request


def count_swapped(request: Request) -> int:
    return len(request.swapped_out.host_blocks) if request.swapped_out is not None else 0
