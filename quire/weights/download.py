"""Fetches one file into a partial file, going on where an earlier try stopped, and checks its SHA-256.

HTTP and nothing else: which file that is comes from `wheel.py`, what becomes of it is up to `store.py`. Proxies and
certificates are the ones that Python's own urllib takes from the environment.
"""

from __future__ import annotations

import functools
import hashlib
import http.client
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ChecksumMismatch, PullError
from quire.weights.disk import Progress, disk_errors, has_sum, require_space

CHUNK_BYTES = 1 << 18
MAX_STALLS = 3
RETRY_WAIT_S = 1.0
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file to fetch."""

    url: str
    sha256: str | None  # None where the index does not say; what is inside is checked on its own then

    @property
    def local_path(self) -> Path | None:
        """The file itself, if it lies on this machine."""
        parts = urllib.parse.urlsplit(self.url)
        return Path(urllib.request.url2pathname(parts.path)) if parts.scheme == "file" else None

    @property
    def identity(self) -> str:
        """Tells its bytes from those of another file, so that they are never appended to each other."""
        return (self.sha256 or hashlib.sha256(self.url.encode()).hexdigest())[:16]

    @property
    def source(self) -> str:
        """Where it comes from, without the credentials a URL may carry."""
        return urllib.parse.urlsplit(self.url).hostname or self.url


@dataclass(frozen=True, slots=True)
class Task:
    """One download: what, into which partial file, what to call it, and what must stay free for the step after."""

    artifact: Artifact
    partial: Path
    what: str
    progress: Progress
    spare_bytes: int = 0

    @property
    def have_bytes(self) -> int:
        return self.partial.stat().st_size if self.partial.exists() else 0


def fetch(task: Task) -> None:
    """Make the partial file whole. A sum that fails after going on from older bytes gets one clean try."""
    resumed = task.have_bytes > 0
    download(task)
    if has_sum(task.partial, task.artifact.sha256):
        return
    task.partial.unlink()
    if not resumed:
        raise ChecksumMismatch(
            f"{task.what}: what {task.artifact.source} sent does not have the SHA-256 that its index promises "
            f"({task.artifact.sha256}) and was deleted. Pull again; if it stays so, a mirror or a proxy alters it."
        )
    fetch(task)


def download(task: Task) -> None:
    """Ask for what is missing until nothing is, giving up when several answers in a row bring nothing new."""
    stalls = 0
    while True:
        before = task.have_bytes
        try:
            if request_rest(task):
                return
            reason = "the connection was cut"
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 416 and reached_end(task, error):
                    return
                reason = explain_status(task, error)
        except (OSError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
        stalls = 0 if task.have_bytes > before else stalls + 1
        if stalls == MAX_STALLS:
            raise PullError(
                f"{task.what}: {task.artifact.source} could not be reached or stopped answering ({reason}) after "
                f"{task.have_bytes:,} bytes. Check the network and the proxy settings, then pull again: what was "
                "fetched is kept."
            )
        time.sleep(RETRY_WAIT_S)


def request_rest(task: Task) -> bool:
    """One request for the bytes that are missing; true once the file is whole."""
    have = task.have_bytes
    headers = {"Range": f"bytes={have}-"} if have else {}
    with urllib.request.urlopen(
        urllib.request.Request(task.artifact.url, headers=headers), timeout=TIMEOUT_S
    ) as answer:
        start, total = place(answer, have)
        append(task, answer, start, total)
    return total is None or task.have_bytes == total


def place(answer: Any, have: int) -> tuple[int, int | None]:
    """At which byte this answer begins and how long the whole file is. A server without ranges begins at 0."""
    length = answer.headers.get("Content-Length")
    if answer.status != 206:
        return 0, int(length) if length else None
    first, total = parse_content_range(answer.headers.get("Content-Range", ""))
    if first != have:
        raise http.client.HTTPException(f"asked for byte {have}, was sent byte {first}")
    return have, total


def parse_content_range(text: str) -> tuple[int | None, int | None]:
    """First byte and total of "bytes 5-9/10"; None for a part that is unknown or unreadable."""
    span, _, total = text.removeprefix("bytes").strip().partition("/")
    first = span.partition("-")[0]
    return int(first) if first.isdecimal() else None, int(total) if total.isdecimal() else None


def append(task: Task, answer: Any, start: int, total: int | None) -> None:
    """Write the answer's body from byte `start` on; unbuffered, so that an interruption loses nothing that arrived."""
    needed = max(0, (total or 0) - start) + task.spare_bytes
    guard = functools.partial(disk_errors, task.partial.parent, needed)
    with guard():
        require_space(task.partial.parent, needed)
        file = task.partial.open("ab", buffering=0)
    with file:
        file.truncate(start)
        done = start
        task.progress(task.what, done, total)
        while chunk := answer.read(CHUNK_BYTES):
            with guard():
                write_all(file, chunk)
            done += len(chunk)
            task.progress(task.what, done, total)


def write_all(file: Any, chunk: bytes) -> None:
    """Unbuffered files may take less than they are given, just before the disk is full."""
    rest = memoryview(chunk)
    while rest:
        rest = rest[file.write(rest) :]


def reached_end(task: Task, error: urllib.error.HTTPError) -> bool:
    """Nothing is left to send: the file is whole, or too long to be this one and then thrown away."""
    _, total = parse_content_range(error.headers.get("Content-Range", ""))
    if task.have_bytes == total:
        return True
    task.partial.unlink(missing_ok=True)
    return False


def explain_status(task: Task, error: urllib.error.HTTPError) -> str:
    """What to make of an HTTP error: a reason to try again, or a PullError where that would not help."""
    if error.code in (408, 416, 429) or error.code >= 500:
        return f"HTTP status {error.code}"
    raise PullError(
        f"{task.what}: {task.artifact.source} answered with HTTP status {error.code} ({error.reason}). "
        "Check pip's index settings. If the index wants a login, let `pip download --no-deps` put the wheel into a "
        "directory, and pull with PIP_NO_INDEX=1 and PIP_FIND_LINKS set to that directory."
    ) from error
