"""Ledger: the answers of a job while it runs, in a folder beside its output. It only grows, and survives any crash.

`answers.jsonl` has a line for each finished row, in the order of their ends. `index` has the row and the end of each
line. An index entry is written after its line is on the disk, so what the index names is whole; what lies behind the
last entry is cut off when a job resumes. `job.json` says which job it is, `engine.json` what its first engine was, and
`written` that the output is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import time
from collections.abc import Iterator, Mapping
from io import RawIOBase
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from quire.errors import InvalidParams

FLUSH_S = 1.0  # answers of at most this time are lost in a crash
FLUSH_BYTES = 1 << 20
READ_ROWS = 1 << 16
FILES = ("answers.jsonl", "index", "engine.json", "job.json", "lock", "written")  # removed in this order
ENTRY = np.dtype([("row", "<u8"), ("end", "<u8")])

Entries = NDArray[Any]


class Ledger:
    """The open ledger of a job. Only one process may have it open."""

    def __init__(self, folder: Path, num_rows: int, locked: BinaryIO) -> None:
        self.folder = folder
        self.num_rows = num_rows
        self.finished = bytearray(num_rows)
        self.num_finished = 0
        self._lines: list[bytes] = []
        self._entries: list[tuple[int, int]] = []
        self._last_flush_s = time.monotonic()
        self._lock = locked
        self._answers = (folder / "answers.jsonl").open("ab", buffering=0)
        self._index = (folder / "index").open("ab", buffering=0)
        try:
            self._end = self._flushed = self._cut_off()
        except InvalidParams:
            self._close()
            raise

    @classmethod
    def open(cls, folder: Path, job: Mapping[str, Any], *, resume: bool) -> Ledger:
        """The ledger of a new job or, with `resume`, of one that was interrupted.

        `job` is what a resumed job must have in common with the interrupted one; `num_rows` is part of it. Raises
        InvalidParams if it was another job, or if another process has it.
        """
        locked = lock(folder)
        try:
            if is_begun(folder):
                check_same(folder, read_job(folder, "job.json"), job, resume)
            else:
                write_whole(folder / "job.json", to_json(job))
            return cls(folder, job["num_rows"], locked)
        except BaseException:
            locked.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            with contextlib.suppress(OSError) if error is not None else contextlib.nullcontext():
                self.flush()
        finally:
            self._close()

    def _close(self) -> None:
        for file in (self._answers, self._index, self._lock):
            file.close()

    def check_engine(self, engine: Mapping[str, Any]) -> None:
        """What answers depend on and is known only when the model is loaded. It is that of the job's first engine."""
        path = self.folder / "engine.json"
        if not path.exists():
            write_whole(path, to_json(engine))
        check_same(self.folder, read_job(self.folder, "engine.json"), engine, resume=True)

    def append(self, row: int, line: bytes) -> None:
        """Keep the answer to a row: a line of JSON without its end of line."""
        assert not self.finished[row], row
        self._lines.append(line + b"\n")
        self._end += len(line) + 1
        self._entries.append((row, self._end))
        self.finished[row] = 1
        self.num_finished += 1
        is_large = self._end - self._flushed >= FLUSH_BYTES
        if is_large or time.monotonic() - self._last_flush_s >= FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write what was appended to the disk: first the lines, then their entries. If that fails, both stay to do."""
        if self._entries:
            num_indexed = os.fstat(self._index.fileno()).st_size
            try:
                write_synced(self._answers, b"".join(self._lines))
                write_synced(self._index, np.array(self._entries, ENTRY).tobytes())
            except OSError:
                os.truncate(self._index.fileno(), num_indexed)
                os.truncate(self._answers.fileno(), self._flushed)
                raise
        self._lines.clear()
        self._entries.clear()
        self._flushed = self._end
        self._last_flush_s = time.monotonic()

    def answers(self) -> Iterator[bytes]:
        """The answers in the order of the rows. All must be finished."""
        self.flush()
        assert self.num_finished == self.num_rows, (self.num_finished, self.num_rows)
        if not self.num_rows:
            return
        starts, ends = self._find_lines()
        with (
            (self.folder / "answers.jsonl").open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            for first in range(0, self.num_rows, READ_ROWS):
                rows = slice(first, first + READ_ROWS)
                for start, end in zip(starts[rows].tolist(), ends[rows].tolist(), strict=True):
                    yield data[start:end]

    def _find_lines(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Where the line of each row starts and ends."""
        entries = self._read_entries()
        starts = np.zeros(self.num_rows, np.uint64)
        ends = np.empty(self.num_rows, np.uint64)
        ends[entries["row"]] = entries["end"]
        starts[entries["row"][1:]] = entries["end"][:-1]
        return starts, ends

    def complete(self, written: Path, output: Path) -> None:
        """Move the written output into place, and delete the ledger. A crash in between leaves a job that resumes."""
        write_whole(self.folder / "written", to_json(identity(written)))
        written.replace(output)
        sync_folder(output.parent)
        remove(self.folder)

    def _cut_off(self) -> int:
        """Mark the finished rows, and remove what an interrupted write left behind. Returns the end of the lines."""
        size = (self.folder / "answers.jsonl").stat().st_size
        entries = self._read_entries()
        is_whole = (entries["end"] <= size) & (entries["row"] < self.num_rows)
        is_whole[1:] &= entries["end"][1:] > entries["end"][:-1]
        entries = entries[: len(entries) if is_whole.all() else int(np.argmin(is_whole))]
        np.frombuffer(self.finished, np.uint8)[entries["row"]] = 1
        self.num_finished = sum(self.finished)
        if self.num_finished != len(entries):
            raise InvalidParams(f"{self.folder / 'index'} names a row twice; remove the folder to begin again.")
        end = int(entries["end"][-1]) if len(entries) else 0
        os.truncate(self._index.fileno(), len(entries) * ENTRY.itemsize)
        os.truncate(self._answers.fileno(), end)
        return end

    def _read_entries(self) -> Entries:
        data = (self.folder / "index").read_bytes()
        return np.frombuffer(data[: len(data) // ENTRY.itemsize * ENTRY.itemsize], ENTRY)


def lock(folder: Path) -> BinaryIO:
    """Make the folder and hold it for this process. The lock ends with the file, so a killed process leaves none."""
    try:
        folder.mkdir(exist_ok=True)
        file = (folder / "lock").open("wb")
    except OSError as error:
        raise InvalidParams(f"{folder} cannot be written: {error.strerror}.") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise InvalidParams(f"{folder} is in use: another process runs this job.") from None
    if not os.fstat(file.fileno()).st_nlink:
        file.close()
        raise InvalidParams(f"{folder} is gone: another process has just completed this job.")
    return file


def is_begun(folder: Path) -> bool:
    """Whether a job has begun there. One that was killed before it had described itself has not."""
    index = folder / "index"
    return (folder / "job.json").exists() or (index.exists() and index.stat().st_size > 0)


def is_complete(folder: Path, output: Path) -> bool:
    """Whether the job has written that output, and was killed before the ledger was deleted."""
    with contextlib.suppress(OSError, ValueError):
        return bool(json.loads((folder / "written").read_bytes()) == identity(output))
    return False


def identity(path: Path) -> list[int]:
    """What a file keeps when it is renamed, and another file under its name has not."""
    status = path.stat()
    return [status.st_ino, status.st_size, status.st_mtime_ns]


def remove(folder: Path) -> None:
    """Delete a ledger. `written` comes last: until then the output says that the job is complete."""
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    folder.rmdir()


def check_same(folder: Path, begun: Mapping[str, Any], job: Mapping[str, Any], resume: bool) -> None:
    if not resume:
        raise InvalidParams(
            f"{folder} has the answers of an interrupted job. Continue it with --resume, or remove the folder."
        )
    if changed := [name for name in sorted({*begun, *job}) if begun.get(name) != job.get(name)]:
        name = changed[0]
        raise InvalidParams(
            f"{folder} was begun with {name} {begun.get(name)!r}, which is {job.get(name)!r} now. Give what it was "
            "begun with, or remove the folder to begin again."
        )


def read_job(folder: Path, name: str) -> dict[str, Any]:
    try:
        job = json.loads((folder / name).read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidParams(f"{folder / name} cannot be read ({error}); remove the folder to begin again.") from None
    if not isinstance(job, dict):
        raise InvalidParams(f"{folder / name} is not the file of a job; remove the folder to begin again.")
    return job


def to_json(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode()


def write_synced(file: RawIOBase, data: bytes) -> None:
    """Write all of the data to an unbuffered file, and wait until it is on the disk."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
    os.fsync(file.fileno())


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that either has all of the data or does not exist."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb", buffering=0) as file:
        write_synced(file, data)
    partial.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
