"""Job: answers all rows of an input file, in any order, and writes the output file in the order of the input.

The output depends on the rows, the model and the job's seed only. Crashes, the order of execution and the number of
rows that run at once do not change a byte of it: times, and counts that depend on the cache, are left out.
`quire batch` calls `run_job`.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from quire import __version__, event_loop
from quire.batch.app import open_app
from quire.batch.ledger import FLUSH_S, Ledger, is_complete, read_job, remove
from quire.batch.output import write_output
from quire.batch.rows import BadRow, Row, RowDefaults, Rows, TextRows, file_digest, make_row, row_digest
from quire.config import EngineConfig
from quire.errors import InvalidParams, show
from quire.text.tools.events import make_call_id

WINDOW_ROWS = 2048  # rows that are sorted so that those with the same beginning run together
NUM_SAMPLES, SAMPLE_BYTES = 256, 4096  # of each file of a model

# The options of an engine that do not change an answer, so a resumed job may have others.
MAY_CHANGE = frozenset(
    {
        "max_requests", "max_tokens_per_step", "num_blocks", "kv_memory", "swap_memory", "prefix_cache", "batching",
        "order", "batch_size", "batch_wait", "waiting_served_ratio", "max_waiting_tokens", "itl_target_ms", "threads",
        "speculate", "seed",
    }
)  # fmt: skip

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class JobFiles:
    """Where a job reads and writes. Its ledger lies beside the output until that is complete."""

    input: Path
    output: Path

    @property
    def ledger(self) -> Path:
        return self.output.with_name(self.output.name + ".ledger")


@dataclass(slots=True)
class JobReport:
    """What a run of a job did."""

    num_rows: int
    num_resumed: int  # finished by earlier runs
    num_errors: int = 0  # rows of this run whose answer is an error
    prompt_tokens: int = 0  # of this run
    completion_tokens: int = 0
    seconds: float = 0.0


class Answerer(Protocol):
    """What answers a row. `App` does."""

    async def post(self, path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        """The status and the body of the response. Raises EngineError if there is no engine any more."""
        ...


def run_job(
    files: JobFiles,
    engine: EngineConfig,
    model_path: Path,
    defaults: RowDefaults,
    *,
    num_replicas: int = 1,
    ray: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
) -> JobReport:
    """Run a job to its end. If it is interrupted, the same call with `resume` continues it."""
    return event_loop.run(_run_job(files, engine, model_path, defaults, num_replicas, ray, resume, progress))


async def _run_job(
    files: JobFiles,
    engine: EngineConfig,
    model_path: Path,
    defaults: RowDefaults,
    num_replicas: int,
    ray: bool,
    resume: bool,
    progress: Progress | None,
) -> JobReport:
    if resume and is_complete(files.ledger, files.output):
        return finish(files)
    check_output(files)
    rows = open_rows(files.input)
    survey = rows.survey()
    job = describe_job(files.input, survey.num_rows, engine, model_path, defaults)
    with Ledger.open(files.ledger, job, resume=resume) as ledger:
        report = JobReport(survey.num_rows, ledger.num_finished)
        begin_s = time.monotonic()
        if ledger.num_finished < survey.num_rows:
            async with open_app(engine, model_path, num_replicas, ray=ray) as app:
                ledger.check_engine({"max_len": app.max_len})
                run = JobRun(app, ledger, report, progress)
                waiting = unfinished_rows(rows, survey.repeated, ledger.finished, defaults)
                await run.answer_rows(sort_windows(waiting), 2 * app.max_requests)
        report.seconds = time.monotonic() - begin_s
        check_unchanged(files, ledger, job["input"])
        ledger.complete(write_output(files.output, ledger.answers()), files.output)
    return report


def finish(files: JobFiles) -> JobReport:
    """Delete the ledger of a job whose output is written, whatever a kill has left of it."""
    begun = files.ledger / "job.json"
    num_rows = read_job(files.ledger, "job.json").get("num_rows", 0) if begun.exists() else 0
    remove(files.ledger)
    return JobReport(num_rows, num_rows)


def check_unchanged(files: JobFiles, ledger: Ledger, digest: str) -> None:
    """The rows of an input that has changed since the job began may be those of either input."""
    if ledger.num_finished < ledger.num_rows or file_digest(files.input) != digest:
        raise InvalidParams(
            f"{files.input} has changed while the job ran. Restore it and continue with --resume, or remove "
            f"{files.ledger} to begin again."
        )


def open_rows(path: Path) -> Rows:
    if path.suffix == ".parquet":
        from quire.batch.parquet import ParquetRows

        return ParquetRows(path)
    return TextRows(path) if path.suffix == ".txt" else Rows(path)


def describe_job(
    path: Path, num_rows: int, engine: EngineConfig, model_path: Path, defaults: RowDefaults
) -> dict[str, Any]:
    """What the output depends on. A job is resumed with the same only."""
    options = {name: value for name, value in asdict(engine).items() if name not in MAY_CHANGE and name != "model"}
    return {
        "quire": __version__,
        "input": file_digest(path),
        "num_rows": num_rows,
        "model": engine.model,
        "model_digest": model_digest(model_path),
        "seed": defaults.seed,
        "chat": defaults.chat,
        "params": dict(defaults.params),
        **options,
    }


def model_digest(path: Path) -> str:
    """Tells models apart without reading all of their bytes: names, sizes, and samples that lie evenly in each file."""
    state = hashlib.blake2b(digest_size=16)
    for file in [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file()):
        size = file.stat().st_size
        state.update(f"{file.name}/{size}/".encode())
        with file.open("rb") as opened:
            for number in range(NUM_SAMPLES):
                opened.seek(size * number // NUM_SAMPLES)
                state.update(opened.read(SAMPLE_BYTES))
    return state.hexdigest()


def check_output(files: JobFiles) -> None:
    if files.output.exists():
        raise InvalidParams(f"{files.output} exists already; remove it, or name another output.")
    if not files.output.parent.is_dir():
        raise InvalidParams(f"{files.output.parent} is not a directory; make it first.")


def unfinished_rows(
    rows: Rows, repeated: Collection[int], finished: Sequence[int], defaults: RowDefaults
) -> Iterator[Row | BadRow]:
    for index, raw in rows.unfinished(finished):
        row = make_row(index, raw, defaults)
        if index in repeated:
            row = BadRow(index, row.id, f"The id {show(row.id)} is that of an earlier row; give each row its own.")
        yield row


def sort_windows(rows: Iterable[Row | BadRow]) -> Iterator[Row | BadRow]:
    """The rows, window by window, those with the same beginning together."""
    waiting = iter(rows)
    while window := list(itertools.islice(waiting, WINDOW_ROWS)):
        yield from sorted(window, key=lambda row: row.sort_key if isinstance(row, Row) else b"")


@dataclass(slots=True)
class JobRun:
    """Answers rows until none is left."""

    app: Answerer
    ledger: Ledger
    report: JobReport
    progress: Progress | None

    async def answer_rows(self, rows: Iterator[Row | BadRow], num_workers: int) -> None:
        """Each worker takes the next row when its last one is answered. The first failure ends all of them."""
        try:
            async with asyncio.TaskGroup() as group:
                flushing = group.create_task(self._flush())
                async with asyncio.TaskGroup() as workers:
                    for _ in range(num_workers):
                        workers.create_task(self._work(rows))
                flushing.cancel()
        except ExceptionGroup as failures:
            raise first_failure(failures) from None

    async def _flush(self) -> None:
        """An answer is on the disk within a second, also when the next one takes long."""
        while True:
            await asyncio.sleep(FLUSH_S)
            self.ledger.flush()

    async def _work(self, rows: Iterator[Row | BadRow]) -> None:
        for row in rows:
            self.ledger.append(row.index, await self._answer(row))
            if self.progress is not None:
                self.progress(self.ledger.num_finished, self.ledger.num_rows)

    async def _answer(self, row: Row | BadRow) -> bytes:
        name = row_digest(f"{row.index}/{row.id}").hex()
        if isinstance(row, BadRow):
            error = {"message": row.message, "type": "invalid_request_error", "param": None, "code": None}
            status, body = 400, {"error": error}
        else:
            status, data = await self.app.post(row.url, msgspec.json.encode(row.body), name)
            body = msgspec.json.decode(data)
        self._count(status, body)
        response = {"status_code": status, "request_id": name, "body": reproducible(body, name)}
        return msgspec.json.encode(
            {"id": f"batch_req_{name}", "custom_id": row.id, "response": response, "error": None}
        )

    def _count(self, status: int, body: Mapping[str, Any]) -> None:
        self.report.num_errors += status >= 400
        usage = body.get("usage") or {}
        self.report.prompt_tokens += usage.get("prompt_tokens", 0)
        self.report.completion_tokens += usage.get("completion_tokens", 0)


def first_failure(failures: BaseExceptionGroup) -> BaseException:
    """The first exception of nested groups."""
    error: BaseException = failures
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def reproducible(body: dict[str, Any], name: str) -> dict[str, Any]:
    """A response without what differs from run to run: times, what the cache and drafts saved, random ids of calls."""
    if "created" in body:
        body["created"] = 0
    if "usage" in body:
        body["usage"] = {name: value for name, value in body["usage"].items() if not name.endswith("_details")}
    for choice in body.get("choices", ()):
        for number, call in enumerate(choice.get("message", {}).get("tool_calls") or ()):
            call["id"] = make_call_id(f"{name}/{choice['index']}", number)
    return body
