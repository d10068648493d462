"""Recorder: the observer that makes the lines of a recording. The engine's process sends them with each step's updates.

The server's process writes them (`server/recording.py`). So what a client has got is in the recording, also when the
engine's process is killed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from quire.config import EngineConfig
from quire.core.plan import Plan, Sampled, Update
from quire.core.request import Finish, Request
from quire.engine.engine import Engine
from quire.engine.machine import machine
from quire.engine.observer import Observer
from quire.trace.anonymous import describe_params, prompt_digests, tenant_digest
from quire.trace.format import Arrival, End, EngineStart, Line, RecordingStart, Reset, Resume, Step, encode


class Recorder(Observer):
    """`take` returns the lines since its last call."""

    def __init__(self, start: RecordingStart, engine: Engine, config: EngineConfig) -> None:
        self._start = start
        self._open: dict[str, Request] = {}  # requests that have not ended
        self._lines: list[bytes] = []
        self._add(describe_engine(engine, config, start, self._at()))

    def take(self) -> bytes:
        lines, self._lines = b"".join(self._lines), []
        return lines

    def on_add(self, request: Request, now_s: float) -> None:
        self._open[request.id] = request
        at = self._at(request.submitted_s or now_s)
        if request.output:
            self._add(resume_line(request, at, self._start))
        else:
            self._add(arrival_line(request, at, self._start))

    def on_abort(self, request_id: str) -> None:
        if request := self._open.pop(request_id, None):
            self._add(self._end_line(request, Update(request.id, [], Finish.ABORT)))

    def on_commit(self, plan: Plan, sampled: Sampled, updates: Sequence[Update], launched_s: float) -> None:
        line = self._step_line(plan, self._at(launched_s))
        line.seconds = None if sampled.seconds is None else round(sampled.seconds, 6)
        grown = [update for update in updates if update.tokens]
        if self._start.anonymous:
            line.num_tokens = {trace_id(update.id): len(update.tokens) for update in grown}
        else:
            line.tokens = {trace_id(update.id): update.tokens for update in grown}
        self._add(line)
        self._end(updates)

    def on_fail(self, plan: Plan, updates: Sequence[Update]) -> None:
        line = self._step_line(plan, self._at())
        line.failed = True
        self._add(line)
        self._end(updates)

    def on_reset(self, updates: Sequence[Update]) -> None:
        self._add(Reset(replica=self._start.replica, at=self._at()))
        self._end(updates)

    def _end(self, updates: Sequence[Update]) -> None:
        for update in updates:
            if update.finish and (request := self._open.pop(update.id, None)):
                self._add(self._end_line(request, update))

    def _step_line(self, plan: Plan, at: float) -> Step:
        return Step(
            replica=self._start.replica,
            step=plan.step,
            at=at,
            done=self._at(),
            requests=[trace_id(request.id) for request in plan.requests],
            starts=plan.starts,
            counts=plan.counts,
            yields=plan.yields,
            drafts={row: len(drafts) for row, drafts in plan.drafts.items()},
            swap_out=len(plan.swap_out),
            swap_in=len(plan.swap_in),
            copies=len(plan.copies),
        )

    def _end_line(self, request: Request, update: Update) -> End:
        assert update.finish is not None
        detail, anonymous = update.detail, self._start.anonymous
        beams = [beam.tokens for beam in detail.beams] if detail is not None and detail.beams is not None else None
        return End(
            id=trace_id(request.id),
            replica=self._start.replica,
            at=self._at(),
            finish=update.finish.value,
            cached=request.num_cached,
            preemptions=request.num_preemptions,
            drafted=request.num_drafted,
            accepted=request.num_accepted,
            message="" if detail is None or anonymous else detail.message,
            beams=None if anonymous else beams,
            beam_lengths=[len(tokens) for tokens in beams] if beams is not None and anonymous else None,
        )

    def _at(self, moment_s: float | None = None) -> float:
        return round((time.monotonic() if moment_s is None else moment_s) - self._start.begin_s, 6)

    def _add(self, line: Line) -> None:
        self._lines.append(encode(line))


def trace_id(request_id: str) -> str:
    """The number of a request of a server: the rest of its id may be from its client."""
    return request_id.partition(":")[0]


def arrival_line(request: Request, at: float, start: RecordingStart) -> Arrival:
    line = Arrival(id=trace_id(request.id), replica=start.replica, at=at, seed=request.seed)
    if not start.anonymous:
        line.name = request.id.partition(":")[2]
    if request.leader is not None:
        line.leader = trace_id(request.leader.id)
        return line
    line.tenant = tenant_digest(start.key, request.tenant, request.salt)
    line.priority, line.max_tokens = request.priority, request.max_tokens
    line.params = describe_params(request.params, anonymous=start.anonymous)
    if start.anonymous:
        line.num_prompt = request.num_prompt
        line.blocks = prompt_digests(start.key, line.tenant, request.prompt)
        return line
    line.prompt = list(request.prompt)
    line.end_token_ids = sorted(request.end_token_ids)
    line.bad_word_ids = [list(word) for word in request.bad_word_ids]
    line.prediction = list(request.prediction)
    return line


def resume_line(request: Request, at: float, start: RecordingStart) -> Resume:
    line = Resume(id=trace_id(request.id), replica=start.replica, at=at)
    if start.anonymous:
        line.num_output = len(request.output)
    else:
        line.output = list(request.output)
    return line


def describe_engine(engine: Engine, config: EngineConfig, start: RecordingStart, at: float) -> EngineStart:
    info, scheduler = engine.info, engine.scheduler
    options = asdict(config)
    if start.anonymous:
        options = {name: without_path(value) for name, value in options.items()}
    return EngineStart(
        replica=start.replica,
        at=at,
        config=options,
        kernels=info.kernels,
        exact=info.exact,
        machine=machine(config),
        block_size=info.cache.block_size,
        num_blocks=info.cache.num_blocks,
        max_len=info.max_len,
        max_requests=info.max_requests,
        max_step_tokens=scheduler.max_tokens_per_step,
        vocab_size=info.config.vocab_size,
    )


def without_path(value: Any) -> Any:
    """A path without its folders."""
    return value.rstrip("/").rpartition("/")[2] if isinstance(value, str) else value
