"""DIR.partial: where a job keeps what it has finished. One process at a time works there."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.errors import DiskFull, InvalidParams


def check_directory(directory: Path) -> None:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InvalidParams(f"{directory} exists. Remove it, or give another directory.", "output")


@contextmanager
def partial_directory(directory: Path) -> Iterator[Path]:
    """DIR.partial. A full disk is an error that says that the job can resume."""
    partial = directory.with_name(directory.name + ".partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with lock(partial):
            check_directory(directory)
            yield partial
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                f"The disk of {partial} is full. What is finished is kept there: free some space and give the same "
                "command again."
            ) from error
        raise InvalidParams(f"{error.filename or partial} cannot be written: {error.strerror}.", "output") from error


@contextmanager
def lock(partial: Path) -> Iterator[None]:
    """Hold DIR.partial for this process. The system ends the lock with the process."""
    with (partial / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidParams(f"{partial} is in use: another process makes this model.", "output") from None
        if not os.fstat(file.fileno()).st_nlink:
            raise InvalidParams(f"{partial} is gone: another process has just made this model.", "output")
        yield
