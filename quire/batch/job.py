"""Job: answers all rows of an input file, in any order, and writes the output file in the order of the input.

The output depends on the rows, the model and the job's seed only. Crashes, the order of execution and the number of
rows that run at once do not change a byte of it: times, and counts that depend on the cache, are left out.
`quire batch` calls `run_job`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from quire import __version__, event_loop
from quire.batch.app import open_app
from quire.batch.ledger import Ledger
from quire.batch.output import write_output
from quire.batch.rows import BadRow, Row, RowDefaults, Rows, file_digest, make_row, row_digest
from quire.config import EngineConfig
from quire.errors import InvalidParams, show

WINDOW_ROWS = 2048  # rows that are sorted so that those with the same beginning run together

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
    resume: bool = False,
    progress: Progress | None = None,
) -> JobReport:
    """Run a job to its end. If it is interrupted, the same call with `resume` continues it."""
    return event_loop.run(_run_job(files, engine, model_path, defaults, num_replicas, resume, progress))


async def _run_job(
    files: JobFiles,
    engine: EngineConfig,
    model_path: Path,
    defaults: RowDefaults,
    num_replicas: int,
    resume: bool,
    progress: Progress | None,
) -> JobReport:
    rows = open_rows(files.input)
    survey = rows.survey()
    job = describe_job(files.input, survey.num_rows, engine, model_path, defaults)
    with open_ledger(files, job, resume) as ledger:
        report = JobReport(survey.num_rows, ledger.num_finished)
        begin_s = time.monotonic()
        if ledger.num_finished < survey.num_rows:
            async with open_app(engine, model_path, num_replicas) as app:
                run = JobRun(app, ledger, report, progress)
                waiting = unfinished_rows(rows, survey.repeated, ledger.finished, defaults)
                await run.answer_rows(sort_windows(waiting), 2 * app.max_requests)
        report.seconds = time.monotonic() - begin_s
        write_output(files.output, ledger.answers())
        ledger.remove()
    return report


def open_rows(path: Path) -> Rows:
    if path.suffix == ".parquet":
        from quire.batch.parquet import ParquetRows

        return ParquetRows(path)
    return Rows(path)


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
        "model_bytes": model_bytes(model_path),
        "seed": defaults.seed,
        "chat": defaults.chat,
        "params": dict(defaults.params),
        **options,
    }


def model_bytes(path: Path) -> int:
    files = [path] if path.is_file() else path.iterdir()
    return sum(file.stat().st_size for file in files)


def open_ledger(files: JobFiles, job: Mapping[str, Any], resume: bool) -> Ledger:
    if files.output.exists():
        raise InvalidParams(f"{files.output} exists already; remove it, or name another output.")
    if not files.output.parent.is_dir():
        raise InvalidParams(f"{files.output.parent} is not a directory; make it first.")
    if not files.ledger.exists():
        return Ledger.begin(files.ledger, job)
    if not resume:
        raise InvalidParams(
            f"{files.ledger} has the answers of an interrupted job. Continue it with --resume, or remove the folder."
        )
    return Ledger.resume(files.ledger, job)


def unfinished_rows(
    rows: Iterable[Any], repeated: Collection[int], finished: Sequence[int], defaults: RowDefaults
) -> Iterator[Row | BadRow]:
    for index, raw in enumerate(rows):
        if finished[index]:
            continue
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
                for _ in range(num_workers):
                    group.create_task(self._work(rows))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

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
        response = {"status_code": status, "request_id": name, "body": without_times(body)}
        return msgspec.json.encode(
            {"id": f"batch_req_{name}", "custom_id": row.id, "response": response, "error": None}
        )

    def _count(self, status: int, body: Mapping[str, Any]) -> None:
        self.report.num_errors += status >= 400
        usage = body.get("usage") or {}
        self.report.prompt_tokens += usage.get("prompt_tokens", 0)
        self.report.completion_tokens += usage.get("completion_tokens", 0)


def without_times(body: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs from run to run: when it was made, and what the cache and drafts saved."""
    if "created" in body:
        body["created"] = 0
    if "usage" in body:
        body["usage"] = {name: value for name, value in body["usage"].items() if not name.endswith("_details")}
    return body
