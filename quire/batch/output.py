"""The output file of a job: JSON lines as OpenAI's batch API writes them, or a Parquet table."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

WRITE_BYTES = 1 << 20


def write_output(path: Path, answers: Iterable[bytes]) -> None:
    """Write the answers to a file that exists only when it is complete."""
    partial = path.with_name(path.name + ".partial")
    if path.suffix == ".parquet":
        from quire.batch.parquet import write_table

        write_table(partial, answers)
    else:
        write_lines(partial, answers)
    partial.replace(path)


def write_lines(path: Path, answers: Iterable[bytes]) -> None:
    with path.open("wb", buffering=WRITE_BYTES) as file:
        file.writelines(answers)
        file.flush()
        os.fsync(file.fileno())
