"""Disk helpers of the store and its downloads: checksums, free space, errors, and the type of progress callbacks."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.errors import DiskFull, PullError

Progress = Callable[[str, int, int | None], None]
"""Called with a description of the current work, the bytes done and, if known, the total bytes."""


def no_progress(what: str, done: int, total: int | None) -> None:
    """A progress callback that reports nothing."""


def matches_sha256(path: Path, sha256: str | None) -> bool:
    return sha256 is None or sha256_of(path) == sha256


def sha256_of(path: Path) -> str:
    import hashlib  # imported here, as shutil is, because a model that is on this machine needs neither

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_space(directory: Path, needed: int) -> None:
    """Raise DiskFull before the first byte is written."""
    if free_bytes(directory) < needed:
        raise disk_full(directory, needed)


def free_bytes(directory: Path) -> int:
    """Free bytes on the disk of `directory`, which need not exist yet."""
    import shutil

    existing = next(folder for folder in (directory, *directory.absolute().parents) if folder.exists())
    return shutil.disk_usage(existing).free


@contextmanager
def disk_errors(directory: Path, needed: int) -> Iterator[None]:
    """Raise an OSError of file operations as DiskFull or PullError. Not for network calls."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(directory, needed) from error
        raise PullError(
            f"{error.filename or directory} cannot be used ({error.strerror or error}). Check that it is writable, or "
            "set QUIRE_CACHE to a writable directory."
        ) from error


def disk_full(directory: Path, needed: int) -> DiskFull:
    return DiskFull(
        f"{directory}: {needed:,} bytes are needed and {free_bytes(directory):,} are available. Free some space, or "
        "set QUIRE_CACHE to a directory on a larger disk, and pull again."
    )
