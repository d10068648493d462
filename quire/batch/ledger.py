"""Ledger: the answers of a job while it runs, in a folder beside its output. It only grows, and survives any crash.

`answers.jsonl` has a line for each finished row, in the order of their ends. `index` has the row and the end of each
line. An index entry is written after its line is on the disk, so what the index names is whole; what lies behind the
last entry is cut off when a job resumes. `job.json` says which job it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from quire.errors import InvalidParams

FLUSH_S = 1.0  # answers of at most this time are lost in a crash
FLUSH_BYTES = 1 << 20
ENTRY = np.dtype([("row", "<u8"), ("end", "<u8")])

Entries = NDArray[Any]


class Ledger:
    """The open ledger of a job. Only one process may have it open."""

    def __init__(self, folder: Path, num_rows: int) -> None:
        self.folder = folder
        self.num_rows = num_rows
        self.finished = bytearray(num_rows)
        self.num_finished = 0
        self._lines: list[bytes] = []
        self._entries: list[tuple[int, int]] = []
        self._last_flush_s = time.monotonic()
        self._lock = lock(folder)
        self._answers = (folder / "answers.jsonl").open("ab")
        self._index = (folder / "index").open("ab")
        try:
            self._end = self._cut_off()
        except InvalidParams:
            self._close()
            raise

    @classmethod
    def begin(cls, folder: Path, job: Mapping[str, Any]) -> Ledger:
        """A new ledger. `job` is what a resumed job must have in common with it; `num_rows` is part of it."""
        folder.mkdir(parents=True)
        write_whole(folder / "job.json", json.dumps(job, indent=1, sort_keys=True).encode())
        return cls(folder, job["num_rows"])

    @classmethod
    def resume(cls, folder: Path, job: Mapping[str, Any]) -> Ledger:
        """The ledger of a job that was interrupted. Raises InvalidParams if it was another job."""
        begun = read_job(folder)
        if changed := [name for name in sorted({*begun, *job}) if begun.get(name) != job.get(name)]:
            name = changed[0]
            raise InvalidParams(
                f"{folder} was begun with {name} {begun.get(name)!r}, which is {job.get(name)!r} now. Give what it was "
                "begun with, or remove the folder to begin again."
            )
        return cls(folder, job["num_rows"])

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
        """Write what was appended to the disk: first the lines, then their entries."""
        write_synced(self._answers, b"".join(self._lines))
        write_synced(self._index, np.array(self._entries, ENTRY).tobytes())
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
        entries = self._read_entries()
        ends = np.empty(self.num_rows, np.uint64)
        starts = np.empty(self.num_rows, np.uint64)
        ends[entries["row"]] = entries["end"]
        starts[entries["row"]] = np.concatenate([np.zeros(1, np.uint64), entries["end"][:-1]])
        with (
            (self.folder / "answers.jsonl").open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
                yield data[start:end]

    def remove(self) -> None:
        """Delete the folder of a job whose output is complete."""
        shutil.rmtree(self.folder)

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
        self._flushed = int(entries["end"][-1]) if len(entries) else 0
        os.truncate(self.folder / "index", len(entries) * ENTRY.itemsize)
        os.truncate(self.folder / "answers.jsonl", self._flushed)
        return self._flushed

    def _read_entries(self) -> Entries:
        data = (self.folder / "index").read_bytes()
        return np.frombuffer(data[: len(data) // ENTRY.itemsize * ENTRY.itemsize], ENTRY)


def lock(folder: Path) -> BinaryIO:
    """Hold the folder for this process. The lock ends with the file, so a killed process leaves none."""
    file = (folder / "lock").open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise InvalidParams(f"{folder} is in use: another process runs this job.") from None
    return file


def read_job(folder: Path) -> dict[str, Any]:
    try:
        job = json.loads((folder / "job.json").read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidParams(
            f"{folder / 'job.json'} cannot be read ({error}); remove the folder to begin again."
        ) from None
    if not isinstance(job, dict):
        raise InvalidParams(f"{folder / 'job.json'} is not the file of a job; remove the folder to begin again.")
    return job


def write_synced(file: BinaryIO, data: bytes) -> None:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that either has all of the data or does not exist."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        write_synced(file, data)
    partial.replace(path)
