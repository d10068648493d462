"""A recording in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

Each replica is a process. Its first thread has the steps, by what they compute; counters show how many requests wait
and run. The other threads are lanes of requests: a request's life, and in it the queue, the prompt and the answer. An
arrow leads from the first step of a request to it. Times are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import itemgetter
from typing import Any

from quire.trace.format import Step
from quire.trace.recording import RecordedRequest, Recording, by_arrival
from quire.trace.summary import last_moment, step_kind

Event = dict[str, Any]
STEPS_LANE = 1
FIRST_LANE = 2  # of requests


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """When a request arrived, was scheduled, got its first token and ended, in seconds. None: that did not happen."""

    number: int
    request: RecordedRequest
    begin: float
    scheduled: float | None
    first_token: float | None
    end: float


def chrome_events(recording: Recording) -> Iterator[Event]:
    scheduled = first_scheduled(recording)
    end = last_moment(recording)
    spans = [
        make_span(recording, number, request, scheduled.get(request.id), end)
        for number, request in enumerate(by_arrival(list(recording.requests.values())))
    ]
    for replica in sorted({span.request.replica for span in spans} | {step.replica for step in recording.steps}):
        own = [span for span in spans if span.request.replica == replica]
        lanes = choose_lanes(own)
        yield from name_lanes(replica, max(lanes.values(), default=0))
        yield from step_events(recording, replica)
        yield from counter_events(own, replica)
        for span in own:
            yield from request_events(span, replica, lanes[span.request.id])
    for kind, moments in (("restart", recording.restarts), ("reset", recording.resets)):
        for moment in moments:
            yield {
                "ph": "i", "s": "p", "name": kind, "cat": "engine", "ts": micros(moment.at), "pid": moment.replica,
                "tid": STEPS_LANE,
            }  # fmt: skip


def chrome_document(recording: Recording) -> Iterator[str]:
    """The JSON document, in pieces: a long recording has many events."""
    yield '{"displayTimeUnit":"ms","traceEvents":['
    for number, event in enumerate(chrome_events(recording)):
        yield (",\n" if number else "\n") + json.dumps(event, separators=(",", ":"))
    yield "\n]}\n"


def micros(seconds: float) -> int:
    """Whole numbers: the end of a slice within another one must not lie behind the other's by rounding."""
    return max(0, round(seconds * 1e6))


def make_span(
    recording: Recording, number: int, request: RecordedRequest, scheduled: float | None, last: float
) -> RequestSpan:
    known = [recording.steps[number].done for number in request.token_steps[:1] if number is not None]
    end = max(request.at, request.end.at if request.end is not None else last)
    return RequestSpan(number, request, request.at, scheduled, known[0] if known else None, end)


def first_scheduled(recording: Recording) -> dict[str, float]:
    """When the first step of each request begins."""
    found: dict[str, float] = {}
    for step, begin, _ in timeline(recording.steps):
        for request_id in step.requests:
            found.setdefault(request_id, begin)
    return found


def timeline(steps: Iterable[Step]) -> Iterator[tuple[Step, float, float]]:
    """Steps with their begins and ends. A plan that was made while another was in flight begins when that one ends: an
    engine computes one at a time."""
    free_at: dict[int, float] = {}
    for step in steps:
        begin = max(step.at, free_at.get(step.replica, 0.0))
        free_at[step.replica] = end = max(step.done, begin)
        yield step, begin, end


def choose_lanes(spans: list[RequestSpan]) -> dict[str, int]:
    """The lowest lane that is free when a request arrives."""
    lanes: dict[str, int] = {}
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    for span in spans:
        while busy and busy[0][0] <= span.begin:
            heappush(free, heappop(busy)[1])
        lane = heappop(free) if free else FIRST_LANE + len(busy)
        lanes[span.request.id] = lane
        heappush(busy, (span.end, lane))
    return lanes


def name_lanes(replica: int, last_lane: int) -> Iterator[Event]:
    yield name_event(replica, 0, "process_name", f"replica {replica}")
    yield name_event(replica, STEPS_LANE, "thread_name", "steps")
    for lane in range(FIRST_LANE, last_lane + 1):
        yield name_event(replica, lane, "thread_name", f"requests {lane - FIRST_LANE + 1}")


def name_event(replica: int, lane: int, kind: str, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": replica, "tid": lane, "args": {"name": name}}


def step_events(recording: Recording, replica: int) -> Iterator[Event]:
    for step, begin, end in timeline(recording.steps):
        if step.replica == replica:
            yield slice_of(step_kind(step), "step", begin, end, replica, STEPS_LANE, step_arguments(step))


def step_arguments(step: Step) -> dict[str, Any]:
    return {
        "step": step.step,
        "requests": " ".join(step.requests),
        "rows": len(step.requests),
        "tokens": sum(step.counts),
        "drafts": sum(step.drafts.values()),
        "swap_out": step.swap_out,
        "swap_in": step.swap_in,
        "copies": step.copies,
    }


def counter_events(spans: list[RequestSpan], replica: int) -> Iterator[Event]:
    changes: list[tuple[float, int, int]] = []
    for span in spans:
        begins = span.end if span.scheduled is None else min(span.end, max(span.begin, span.scheduled))
        changes += [(span.begin, 1, 0), (begins, -1, 0), (begins, 0, 1), (span.end, 0, -1)]
    waiting = running = 0
    for moment, more_waiting, more_running in sorted(changes, key=itemgetter(0)):
        waiting, running = waiting + more_waiting, running + more_running
        yield {
            "ph": "C", "name": "requests", "ts": micros(moment), "pid": replica, "tid": 0,
            "args": {"waiting": waiting, "running": running},
        }  # fmt: skip


def request_events(span: RequestSpan, replica: int, lane: int) -> Iterator[Event]:
    request = span.request
    yield slice_of(
        f"request {request.id}", "request", span.begin, span.end, replica, lane,
        {
            "name": request.name,
            "prompt_tokens": request.num_prompt,
            "output_tokens": request.num_output,
            "cached_tokens": request.end.cached if request.end is not None else 0,
            "preemptions": request.end.preemptions if request.end is not None else 0,
            "finish": request.end.finish if request.end is not None else "unfinished",
        },
    )  # fmt: skip
    if span.scheduled is None:
        yield slice_of("queue", "request", span.begin, span.end, replica, lane, {})
        return
    scheduled = min(span.end, max(span.begin, span.scheduled))
    yield slice_of("queue", "request", span.begin, scheduled, replica, lane, {})
    answered = span.end if span.first_token is None else min(span.end, max(scheduled, span.first_token))
    yield slice_of("prompt", "request", scheduled, answered, replica, lane, {})
    if answered < span.end:
        yield slice_of("answer", "request", answered, span.end, replica, lane, {})
    flow = {"name": "first step", "cat": "request", "id": span.number, "pid": replica}
    yield {**flow, "ph": "s", "ts": micros(scheduled), "tid": STEPS_LANE}
    yield {**flow, "ph": "f", "bp": "e", "ts": micros(scheduled), "tid": lane}


def slice_of(
    name: str, category: str, begin: float, end: float, replica: int, lane: int, arguments: dict[str, Any]
) -> Event:
    return {
        "ph": "X", "name": name, "cat": category, "ts": micros(begin), "dur": max(0, micros(end) - micros(begin)),
        "pid": replica, "tid": lane, "args": arguments,
    }  # fmt: skip
