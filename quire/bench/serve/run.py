"""`quire bench serve`: what a server does under load, seen from a client.

Any server with OpenAI's streaming completions can be measured; nothing here knows quire's own. This file puts the parts
together: settings -> `questions` -> times (`arrivals`) -> requests (`asking`) -> figures (`measures`).
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import resource
import shlex
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from quire.bench.serve.arrivals import closed_loop, open_loop, prepare, random_times
from quire.bench.serve.client import Asker, Form, Question, find_model
from quire.bench.serve.http_client import Pool, Target
from quire.bench.serve.metrics import Record, errors_by_kind, summarize
from quire.bench.serve.server_process import spawn
from quire.bench.serve.settings import CONCURRENCY, NUM_REQUESTS, Settings
from quire.bench.serve.traces import Excerpt
from quire.bench.serve.workload import questions, read_excerpt, warm_up
from quire.config import DEFAULT_MODEL

Report = Callable[[int, int | None], None]


@dataclass(slots=True)
class Tally:
    """What has been measured so far."""

    records: list[Record] = field(default_factory=list)
    interrupted: bool = False
    cpu_s: float = 0.0
    wall_s: float = 0.0


def run(settings: Settings, report: Report, *, with_requests: bool = False) -> dict[str, Any]:
    """Measure a server; the document that `--json` prints. Ctrl-C ends it with what there is."""
    replayed = read_excerpt(settings)  # before any server is started or asked
    raise_file_limit()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(measure(settings, replayed, report, with_requests))


async def measure(settings: Settings, replayed: Excerpt | None, report: Report, with_requests: bool) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        server, url = None, settings.base_url
        if settings.spawn:
            server, url = await stack.enter_async_context(spawn(serve_command(settings)))
        assert url is not None
        pool = Pool(Target.of(url, settings.api_key))
        stack.callback(pool.close)
        model = settings.model if settings.model and not settings.spawn else await find_model(pool)
        form = Form(pool.target, model, settings.chat, settings.temperature, settings.extra_fields)
        ratio = await warm_up(settings, pool, form)
        tally = await load(settings, replayed, pool, questions(settings, replayed, form, ratio), report)
        document = describe(settings, form, tally)
        if replayed is not None:
            document["trace"] = describe_trace(replayed, None if settings.trace_ids else ratio.per_word)
        if server is not None and server.exit_status is not None:
            document["server_died"] = {"exit_status": server.exit_status, "last_words": server.last_words}
    if with_requests:
        document["requests"] = rows(tally.records)
    return document


def serve_command(settings: Settings) -> list[str]:
    options = shlex.split(settings.spawn_options or "")
    return [sys.executable, "-m", "quire.cli.main", "serve", settings.model or DEFAULT_MODEL, "--port", "0", *options]


async def load(
    settings: Settings, replayed: Excerpt | None, pool: Pool, asked: Iterator[Question], report: Report
) -> Tally:
    """Send everything, each at its time, and wait for the answers."""
    tally = Tally()
    count = len(replayed.entries) if replayed else settings.num_requests or NUM_REQUESTS

    def note(record: Record) -> None:
        tally.records.append(record)
        report(len(tally.records), count)

    send = Asker(pool, settings.timeout, note).ask
    ready = prepare(asked)
    if settings.rate is not None:
        times = random_times(settings.rate, settings.burstiness or 1.0, count, f"{settings.seed} arrivals")
        work = open_loop(ready, times, send)
    elif replayed is not None and settings.concurrency is None:
        work = open_loop(ready, [entry.at_s for entry in replayed.entries], send)
    else:
        work = closed_loop(ready, min(settings.concurrency or CONCURRENCY, count), send)
    report(0, count)
    cpu, wall = time.process_time(), time.perf_counter()
    tally.interrupted = not await until_interrupted(work)
    tally.cpu_s, tally.wall_s = time.process_time() - cpu, time.perf_counter() - wall
    return tally


async def until_interrupted(work: Coroutine[Any, Any, None]) -> bool:
    """Whether it came to its end. The first Ctrl-C cancels it; the next one is as usual."""
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


def describe(settings: Settings, form: Form, tally: Tally) -> dict[str, Any]:
    return {
        "url": form.target.url(form.path),
        "model": form.model,
        "settings": settings.to_dict(),
        "load": settings.in_words,
        "interrupted": tally.interrupted,
        "summary": summarize(tally.records, settings.limits),
        "errors": errors_by_kind(tally.records),
        "client": describe_client(tally),
    }


def describe_trace(replayed: Excerpt, tokens_per_word: float | None) -> dict[str, Any]:
    return {
        "num_read": replayed.num_read,
        "num_replayed": len(replayed.entries),
        "num_skipped_prompt_too_long": replayed.num_too_long,
        "num_skipped_without_answer": replayed.num_empty,
        "num_answers_shortened": replayed.num_shortened,
        "tokens_per_word": tokens_per_word,
    }


def rows(records: list[Record]) -> list[dict[str, Any]]:
    """What is known of each request, in the order in which they were to be sent."""
    begin = min((record.sent for record in records), default=0.0)
    return [record.to_dict(begin) for record in sorted(records, key=lambda record: record.number)]


def describe_client(tally: Tally) -> dict[str, Any]:
    """What the measuring itself took: it shares the machine with a local server."""
    num_chunks = sum(record.num_chunks for record in tally.records)
    return {
        "loop": "uvloop" if importlib.util.find_spec("uvloop") else "asyncio",
        "cpu_s": tally.cpu_s,
        "cpu_share": tally.cpu_s / tally.wall_s if tally.wall_s else None,
        "num_chunks": num_chunks,
        "cpu_us_per_chunk": 1e6 * tally.cpu_s / num_chunks if num_chunks else None,
    }


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    if not importlib.util.find_spec("uvloop"):
        return asyncio.new_event_loop
    import uvloop

    return uvloop.new_event_loop


def raise_file_limit() -> None:
    """Every request in flight is a socket, so take what the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def step_back() -> None:
    """Take no core from a server on this machine in the middle of its work; the server, if a child, is not bound."""
    if hasattr(os, "SCHED_BATCH"):
        with suppress(PermissionError):  # some containers forbid it; the figures then hold a little less for the server
            os.sched_setscheduler(0, os.SCHED_BATCH | os.SCHED_RESET_ON_FORK, os.sched_param(0))
