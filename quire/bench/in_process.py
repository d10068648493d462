"""Requests that arrive at an engine in this process, in an open or a closed loop, as records of `bench serve`.

The engine is called as in a server: requests that have arrived are added, then a step is run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.bench.serve.metrics import RequestRecord
from quire.core.params import SamplingParams
from quire.core.plan import Update
from quire.core.request import Finish, Request
from quire.engine.client import InProcess
from quire.errors import PromptTooLong

Report = Callable[[int, int | None], None]


class TimedRequest(NamedTuple):
    """A request and its time of arrival in seconds. None is at once, in a closed loop."""

    at_s: float | None
    request: Request


@dataclass(slots=True)
class Progress:
    """What has been seen of a request, on the clock of the run."""

    timed: TimedRequest
    sent_s: float
    times: list[float] = field(default_factory=list)
    num_tokens: int = 0


def make_request(name: str, prompt: Sequence[int], output_tokens: int) -> Request:
    """Greedy, of exactly `output_tokens`."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output_tokens)
    return Request(name, prompt, params, max_tokens=output_tokens)


def answer(
    client: InProcess,
    requests: Sequence[TimedRequest],
    *,
    concurrency: int | None = None,
    on_end: Callable[[RequestRecord], None] | None = None,
) -> list[RequestRecord]:
    """Answer all requests. `concurrency` is the most that are in the engine at once. Records are in the given order."""
    for timed in requests:
        check_length(timed.request, client.info.max_len)
    waiting, running = deque(requests), dict[str, Progress]()
    records: dict[str, RequestRecord] = {}
    numbers = {timed.request.id: number for number, timed in enumerate(requests)}
    begin_s = time.perf_counter()
    while waiting or running:
        now_s = time.perf_counter() - begin_s
        while waiting and is_due(waiting[0], now_s) and (concurrency is None or len(running) < concurrency):
            timed = waiting.popleft()
            # A request that had to arrive during the last step was sent when it was due.
            sent_s = time.perf_counter() - begin_s if timed.at_s is None else timed.at_s
            running[timed.request.id] = Progress(timed, sent_s)
            client.add(timed.request)
        if not running:
            sleep_until(client, begin_s + (waiting[0].at_s or 0.0))
            continue
        updates = client.step()
        now_s = time.perf_counter() - begin_s
        for update in updates:
            take(running[update.id], update, now_s)
            if update.finish is not None:
                progress = running.pop(update.id)
                records[update.id] = record = make_record(numbers[update.id], progress, update, now_s)
                if on_end:
                    on_end(record)
    return [records[timed.request.id] for timed in requests]


def check_length(request: Request, max_len: int) -> None:
    if request.max_len > max_len:
        raise PromptTooLong(
            f"{request.num_prompt:,} prompt tokens and {request.max_tokens:,} new ones are more than the engine takes "
            f"({max_len:,}). Lower --prompt-tokens or --output-tokens, or raise --max-len."
        )


def is_due(timed: TimedRequest, now_s: float) -> bool:
    return timed.at_s is None or timed.at_s <= now_s


def sleep_until(client: InProcess, moment_s: float) -> None:
    """Without requests an engine may prepare later steps."""
    if not client.engine.idle():
        time.sleep(max(0.0, moment_s - time.perf_counter()))


def take(progress: Progress, update: Update, now_s: float) -> None:
    if update.tokens:
        progress.times.append(now_s)
        progress.num_tokens += len(update.tokens)


def make_record(number: int, progress: Progress, update: Update, now_s: float) -> RequestRecord:
    request = progress.timed.request
    failed = update.finish is Finish.ERROR
    return RequestRecord(
        number=number,
        wanted_tokens=request.max_tokens,
        due=progress.timed.at_s,
        sent=progress.sent_s,
        ended=now_s,
        times=progress.times,
        output_tokens=progress.num_tokens,
        counted_by="usage",
        prompt_tokens=request.num_prompt,
        cached_tokens=request.num_cached,
        num_chunks=len(progress.times),
        failure="error" if failed else None,
        detail=update.detail.message if failed and update.detail else None,
    )


def request_rows(records: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    """A row for each request, from the beginning of the run."""
    return [record.to_dict(0.0) for record in records]


def answers(requests: Sequence[TimedRequest]) -> list[list[int]]:
    return [timed.request.tokens[timed.request.num_prompt :] for timed in requests]
