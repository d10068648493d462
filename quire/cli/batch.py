"""`quire batch`: answer the rows of a file."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from quire.cli.errors import say
from quire.cli.generate import add_sampling, sampling_options
from quire.cli.options import add_engine_options, add_json, engine_config
from quire.errors import EngineError, InvalidParams
from quire.progress import Report, bar
from quire.store import resolve

REPORT_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "input",
        type=Path,
        metavar="IN",
        help="OpenAI batch lines, JSON lines with prompt or messages, a .txt file with a prompt a line, or .parquet",
    )
    parser.add_argument(
        "output", type=Path, metavar="OUT", help="the answers, in the order of the rows: JSON lines, or .parquet"
    )
    parser.add_argument("--resume", action="store_true", help="continue a job that was interrupted")
    parser.add_argument("--chat", action="store_true", help="ask plain prompts as questions")
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="engines that share the rows; default 1")
    parser.add_argument("--ray", action="store_true", help="let Ray place the engines, on $RAY_ADDRESS or here")
    add_json(parser)
    add_sampling(parser, max_tokens=None)
    add_engine_options(parser)


def run(arguments: argparse.Namespace) -> None:
    """Answer the rows of a file. An interrupted job resumes."""
    # Options are for rows that do not set them.
    params = {
        name: value for name, value in sampling_options(arguments).items() if name != "seed" and value is not None
    }
    config = engine_config(arguments)
    if arguments.replicas < 1:
        raise InvalidParams(f"replicas is {arguments.replicas}; give a whole number of at least 1.")
    with bar("downloading") as report:
        files = resolve(config.model, progress=lambda what, done, total: report(done, total))
    from quire.batch.job import JobFiles, run_job
    from quire.batch.rows import RowDefaults

    job = JobFiles(arguments.input, arguments.output)
    defaults = RowDefaults(config.model, config.seed or 0, arguments.chat, params)
    try:
        with bar("answering", unit="rows") as draw, progress_lines(draw) as progress:
            result = run_job(
                job, config, files.path, defaults,
                num_replicas=arguments.replicas, ray=arguments.ray, resume=arguments.resume, progress=progress,
            )  # fmt: skip
    except (KeyboardInterrupt, OSError, EngineError):
        if job.ledger.exists():
            say("interrupted; --resume continues the job")
        raise
    if arguments.json:
        print(json.dumps({"output": str(job.output), **asdict(result)}))
    new = result.num_rows - result.num_resumed
    say(
        f"{job.output}: {result.num_rows:,} rows, {new:,} of them answered in {result.seconds:.1f} s "
        f"({result.completion_tokens:,} tokens), {result.num_errors:,} with an error"
    )


@contextmanager
def progress_lines(draw: Report) -> Iterator[Report]:
    """Where stderr is no terminal, a line now and then takes the place of the bar."""
    begin_s = last_s = time.monotonic()
    begun_with: int | None = None

    def report(done: int, total: int | None) -> None:
        nonlocal last_s, begun_with
        draw(done, total)
        begun_with = done - 1 if begun_with is None else begun_with
        now_s = time.monotonic()
        if sys.stderr is None or sys.stderr.isatty() or now_s - last_s < REPORT_S or total is None:
            return
        last_s = now_s
        rate = (done - begun_with) / (now_s - begin_s)
        say(f"{done:,} of {total:,} rows; {rate:.1f} a second; about {(total - done) / rate:,.0f} s left")

    yield report
