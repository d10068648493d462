"""Models on the Hugging Face hub: downloads a repository's weights, or one of its files, into the hub's own cache.

A thin layer over `huggingface_hub`, which is imported on first use. Its errors are raised as quire's.
"""

from __future__ import annotations

import errno
import io
import json
import re
from pathlib import Path
from typing import Any

from quire.errors import DiskFull, ModelNotFound, PullError, QuireError
from quire.store.disk import Progress, no_progress

NAME = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(?P<file>:[\w./-]+\.gguf)?")
HUB_URL = "https://huggingface.co"
ALLOW_PATTERNS = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
# Subfolders hold the weights in other formats (original, onnx, ...). consolidated.* repeats the shards in one file.
IGNORE_PATTERNS = ["*/*", "consolidated*"]


def split_name(name: str) -> tuple[str, str | None] | None:
    """Repository and file of "org/name" or "org/name:file.gguf"; None if it cannot be a hub name."""
    matched = NAME.fullmatch(name)
    if matched is None or matched["repository"].endswith(".gguf"):
        return None
    return matched["repository"], matched["file"].removeprefix(":") if matched["file"] else None


def resolve_from_hub(repository: str, file: str | None, *, download: bool, progress: Progress) -> Path:
    """The repository's directory, or one file of it. Without `download` only the hub's cache is searched."""
    patterns: dict[str, Any] = {"allow_patterns": ALLOW_PATTERNS, "ignore_patterns": IGNORE_PATTERNS}
    if file is not None:
        patterns = {"allow_patterns": [file]}
    directory = snapshot(repository, patterns, download, progress)
    if file is None:
        return require_weights(repository, directory)
    if not (directory / file).is_file():
        raise ModelNotFound(f"the repository {repository} has no file {file}. Check the spelling on its page.")
    return directory / file


def find_in_hub_cache(repository: str) -> Path | None:
    """The repository's directory in the hub's cache, or None if it has no weights or lacks a shard."""
    if not cache_folder(repository).is_dir():
        return None
    try:
        directory = resolve_from_hub(repository, None, download=False, progress=no_progress)
    except ModelNotFound:
        return None
    return directory if has_all_shards(directory) else None


def cache_folder(repository: str) -> Path:
    """Where the hub's cache keeps a repository. Needs only the constants of `huggingface_hub`, which load quickly."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"


def has_all_shards(directory: Path) -> bool:
    """Whether every shard in the index exists. The cache keeps the files of an interrupted download."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return True
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return False
    return all((directory / str(shard)).is_file() for shard in shards)


def require_weights(repository: str, directory: Path) -> Path:
    if (directory / "config.json").is_file() and any(directory.glob("*.safetensors")):
        return directory
    raise ModelNotFound(
        f"the repository {repository} lacks config.json or safetensors files. If it has GGUF files, give the name of "
        f"one: {repository}:FILE.gguf."
    )


def snapshot(repository: str, patterns: dict[str, Any], download: bool, progress: Progress) -> Path:
    """Call huggingface_hub. Every exception in it is raised as one of quire's errors."""
    import huggingface_hub

    bars = reporting_bars(repository, progress)
    try:
        return Path(
            huggingface_hub.snapshot_download(repository, local_files_only=not download, tqdm_class=bars, **patterns)
        )
    except Exception as error:
        raise translate(repository, error, download) from error


def translate(repository: str, error: Exception, download: bool) -> QuireError:
    """quire's error for one of the hub's. The order matters: GatedRepoError is a RepositoryNotFoundError."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return PullError(
            f"{repository} is gated. Log in at {HUB_URL}/{repository} and accept its terms, then run `hf auth login` "
            f"(or set HF_TOKEN) with a token of that account, and pull again. ({first_line(error)})"
        )
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return ModelNotFound(
            f"the hub has no repository {repository}, and there is no such file or directory. Check the spelling. A "
            "private repository needs `hf auth login`."
        )
    if isinstance(error, errors.LocalEntryNotFoundError) and not download:
        return ModelNotFound(
            f"{repository} is not in the hub's cache on this machine. Download it with `quire pull {repository}`."
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(
            f"{repository} does not fit on the disk ({error}). Free some space, or move the hub's cache with HF_HOME."
        )
    return PullError(
        f"{repository} could not be downloaded: the hub could not be reached ({first_line(error)}). Check the network "
        "and pull again, or copy the model's directory (config.json, tokenizer and *.safetensors) to this machine and "
        "give its path."
    )


def first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def reporting_bars(repository: str, progress: Progress) -> Any:
    """A tqdm class, which huggingface_hub requires. It reports bytes to `progress` and draws nothing."""
    from huggingface_hub.utils.tqdm import tqdm

    def start(bar: Any, *args: Any, **options: Any) -> None:
        tqdm.__init__(bar, *args, **{**options, "file": io.StringIO(), "disable": False})  # type: ignore[no-untyped-call, unused-ignore]

    def report(bar: Any, *args: Any, **options: Any) -> None:
        if bar.unit == "B":
            progress(f"fetching {repository}", int(bar.n), int(bar.total) if bar.total else None)

    return type("ReportingBar", (tqdm,), {"__init__": start, "display": report})
