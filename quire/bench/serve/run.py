"""`quire bench serve`: measure a server under load, as its clients see it.

Any server with OpenAI's streaming completions can be measured; nothing here is specific to quire. This file connects
the modules: `settings` -> requests (`workload`) -> times (`arrivals`) -> responses (`client`) -> results (`metrics`).
"""

from __future__ import annotations

import asyncio
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from quire import event_loop
from quire.bench.serve.arrivals import closed_loop, open_loop, prefetch, random_times
from quire.bench.serve.client import BenchClient, PreparedRequest, RequestTemplate, find_model
from quire.bench.serve.http_client import ConnectionPool, Target
from quire.bench.serve.metrics import RequestRecord, errors_by_kind, summarize
from quire.bench.serve.server_process import spawn
from quire.bench.serve.settings import CONCURRENCY, NUM_REQUESTS, Settings
from quire.bench.serve.traces import TraceSlice
from quire.bench.serve.workload import load_trace, make_requests, warmup
from quire.config import DEFAULT_MODEL
from quire.file_limit import raise_file_limit
from quire.kernels import isa

Report = Callable[[int, int | None], None]


@dataclass(slots=True)
class Measurement:
    """The records of a run, and the CPU time of the client."""

    records: list[RequestRecord] = field(default_factory=list)
    interrupted: bool = False
    cpu_s: float = 0.0
    wall_s: float = 0.0


def run(settings: Settings, report: Report, *, with_requests: bool = False) -> dict[str, Any]:
    """Measure a server, and return the document that `--json` prints. After Ctrl-C it has the requests that ended."""
    replayed = load_trace(settings)  # a bad trace is refused before a server is started
    raise_file_limit()
    return event_loop.run(measure(settings, replayed, report, with_requests))


async def measure(
    settings: Settings, replayed: TraceSlice | None, report: Report, with_requests: bool
) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        server, url = None, settings.base_url
        if settings.spawn:
            server, url = await stack.enter_async_context(spawn(serve_command(settings)))
        assert url is not None
        pool = ConnectionPool(Target.of(url, settings.api_key))
        stack.callback(pool.close)
        model = settings.model if settings.model and not settings.spawn else await find_model(pool)
        template = RequestTemplate(pool.target, model, settings.chat, settings.temperature, settings.extra_fields)
        ratio = await warmup(settings, pool, template)
        measured = await send_all(settings, replayed, pool, make_requests(settings, replayed, template, ratio), report)
        document = describe(settings, template, measured)
        if replayed is not None:
            document["trace"] = describe_trace(replayed, None if settings.trace_ids else ratio.per_word)
        if server is not None and server.exit_status is not None:
            document["server_died"] = {"exit_status": server.exit_status, "last_words": server.last_lines}
    if with_requests:
        document["requests"] = rows(measured.records)
    return document


def serve_command(settings: Settings) -> list[str]:
    options = shlex.split(settings.spawn_options or "")
    return [sys.executable, "-m", "quire.cli.main", "serve", settings.model or DEFAULT_MODEL, "--port", "0", *options]


async def send_all(
    settings: Settings,
    replayed: TraceSlice | None,
    pool: ConnectionPool,
    requests: Iterator[PreparedRequest],
    report: Report,
) -> Measurement:
    """Send all requests, each at its time, and wait for the responses."""
    measured = Measurement()
    count = len(replayed.entries) if replayed else settings.num_requests or NUM_REQUESTS

    def on_record(record: RequestRecord) -> None:
        measured.records.append(record)
        report(len(measured.records), count)

    send = BenchClient(pool, settings.timeout, on_record).send
    ready = prefetch(requests)
    if settings.rate is not None:
        times = random_times(settings.rate, settings.burstiness or 1.0, count, f"{settings.seed} arrivals")
        work = open_loop(ready, times, send)
    elif replayed is not None and settings.concurrency is None:
        work = open_loop(ready, [entry.at_s for entry in replayed.entries], send)
    else:
        work = closed_loop(ready, min(settings.concurrency or CONCURRENCY, count), send)
    report(0, count)
    cpu, wall = time.process_time(), time.perf_counter()
    measured.interrupted = not await until_interrupted(work)
    measured.cpu_s, measured.wall_s = time.process_time() - cpu, time.perf_counter() - wall
    return measured


async def until_interrupted(work: Coroutine[Any, Any, None]) -> bool:
    """True if the work completed. The first Ctrl-C cancels it; the second one has its usual effect."""
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(work)
    interrupted = False

    def stop() -> None:
        nonlocal interrupted
        interrupted = True
        loop.remove_signal_handler(signal.SIGINT)
        task.cancel()

    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        await task
    except asyncio.CancelledError:
        if not interrupted:
            raise
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return not interrupted


def describe(settings: Settings, template: RequestTemplate, measured: Measurement) -> dict[str, Any]:
    return {
        "url": template.target.url(template.path),
        "model": template.model,
        "settings": settings.to_dict(),
        "load": settings.description,
        "interrupted": measured.interrupted,
        "summary": summarize(measured.records, settings.limits),
        "errors": errors_by_kind(measured.records),
        "client": describe_client(measured),
    }


def describe_trace(replayed: TraceSlice, tokens_per_word: float | None) -> dict[str, Any]:
    return {
        "num_read": replayed.num_read,
        "num_replayed": len(replayed.entries),
        "num_skipped_prompt_too_long": replayed.num_too_long,
        "num_skipped_without_answer": replayed.num_empty,
        "num_answers_shortened": replayed.num_shortened,
        "tokens_per_word": tokens_per_word,
    }


def rows(records: list[RequestRecord]) -> list[dict[str, Any]]:
    """A row for each request, in the order of sending."""
    begin = min((record.sent for record in records), default=0.0)
    return [record.to_dict(begin) for record in sorted(records, key=lambda record: record.number)]


def describe_client(measured: Measurement) -> dict[str, Any]:
    """The cost of the client itself, which shares the machine with a local server."""
    num_chunks = sum(record.num_chunks for record in measured.records)
    cpu = isa.read_cpu()
    return {
        "machine": {"cpu": cpu.model, "cores": cpu.cores, "python": platform.python_version()},
        "loop": event_loop.loop_name(),
        "cpu_s": measured.cpu_s,
        "cpu_share": measured.cpu_s / measured.wall_s if measured.wall_s else None,
        "num_chunks": num_chunks,
        "cpu_us_per_chunk": 1e6 * measured.cpu_s / num_chunks if num_chunks else None,
    }


def lower_priority() -> None:
    """Let a server on this machine run first (SCHED_BATCH). A server started as a child keeps the normal policy."""
    if hasattr(os, "SCHED_BATCH"):
        with suppress(PermissionError):  # some containers forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH | os.SCHED_RESET_ON_FORK, os.sched_param(0))
