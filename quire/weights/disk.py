"""What the store and its downloads share: checksums, room on the disk, and how progress is told."""

from __future__ import annotations

import errno
import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.errors import DiskFull, PullError

Progress = Callable[[str, int, int | None], None]
"""Called with what is being done, the bytes done and, where it is known, the bytes in all."""


def silent(what: str, done: int, total: int | None) -> None:
    """The progress of who does not want to see any."""


def has_sum(path: Path, sha256: str | None) -> bool:
    return sha256 is None or file_sum(path) == sha256


def file_sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_space(directory: Path, needed: int) -> None:
    """Refuse before the first byte rather than after the last that fits."""
    if free_bytes(directory) < needed:
        raise disk_full(directory, needed)


def free_bytes(directory: Path) -> int:
    """What is free where `directory` is, or will be once it is made."""
    existing = next(folder for folder in (directory, *directory.absolute().parents) if folder.exists())
    return shutil.disk_usage(existing).free


@contextmanager
def disk_errors(directory: Path, needed: int) -> Iterator[None]:
    """Turn what the system says while we work on files into errors that tell what to do. Not for network calls."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(directory, needed) from error
        raise PullError(
            f"{error.filename or directory} cannot be used ({error.strerror or error}). Check that it can be written "
            "to, or point QUIRE_CACHE at a directory that can."
        ) from error


def disk_full(directory: Path, needed: int) -> DiskFull:
    return DiskFull(
        f"{directory}: {needed:,} bytes are needed and {free_bytes(directory):,} are available. Free some space, or "
        "point QUIRE_CACHE at a larger disk, and pull again."
    )
