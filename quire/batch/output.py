"""The output file of a job: JSON lines as OpenAI's batch API writes them, or a Parquet table."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

WRITE_BYTES = 1 << 20


def write_output(path: Path, answers: Iterable[bytes]) -> Path:
    """Write the answers beside `path`, in its format. Returns the file, which is complete and on the disk."""
    partial = path.with_name(path.name + ".partial")
    try:
        if path.suffix == ".parquet":
            from quire.batch.parquet import write_table

            write_table(partial, answers)
        else:
            write_lines(partial, answers)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    return partial


def write_lines(path: Path, answers: Iterable[bytes]) -> None:
    with path.open("wb", buffering=WRITE_BYTES) as file:
        file.writelines(answers)
