"""Models on the Hugging Face hub: fetches a repository's weights, or one of its files, into the hub's own cache.

A thin layer over `huggingface_hub`, which is imported when a hub name is used and not before. Its errors become ours.
"""

from __future__ import annotations

import errno
import io
import re
from pathlib import Path
from typing import Any

from quire.errors import DiskFull, ModelNotFound, PullError, QuireError
from quire.weights.disk import Progress

NAME = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(?P<file>:[\w./-]+\.gguf)?")
WANTED = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
# Folders hold the same weights in other formats (original, onnx, ...); consolidated.* repeats the shards in one file.
UNWANTED = ["*/*", "consolidated*"]


def split_name(name: str) -> tuple[str, str | None] | None:
    """Repository and file of "org/name" or "org/name:file.gguf"; None for what cannot be a name on the hub."""
    matched = NAME.fullmatch(name)
    if matched is None or matched["repository"].endswith(".gguf"):
        return None
    return matched["repository"], matched["file"].removeprefix(":") if matched["file"] else None


def fetch_from_hub(repository: str, file: str | None, *, download: bool, progress: Progress) -> Path:
    """The repository's directory, or one file of it. Without `download`, only what the cache has."""
    wanted: dict[str, Any] = {"allow_patterns": WANTED, "ignore_patterns": UNWANTED}
    if file is not None:
        wanted = {"allow_patterns": [file]}
    directory = snapshot(repository, wanted, download, progress)
    if file is None:
        return require_weights(repository, directory)
    if not (directory / file).is_file():
        raise ModelNotFound(f"the repository {repository} has no file {file}. Check the spelling on its page.")
    return directory / file


def require_weights(repository: str, directory: Path) -> Path:
    if (directory / "config.json").is_file() and any(directory.glob("*.safetensors")):
        return directory
    raise ModelNotFound(
        f"the repository {repository} has no config.json with safetensors beside it. If it holds GGUF files, name one "
        f"of them: {repository}:FILE.gguf."
    )


def snapshot(repository: str, wanted: dict[str, Any], download: bool, progress: Progress) -> Path:
    """Let huggingface_hub fetch; whatever goes wrong in it is raised as one of our errors."""
    import huggingface_hub

    bars = reporting_bars(repository, progress)
    try:
        return Path(
            huggingface_hub.snapshot_download(repository, local_files_only=not download, tqdm_class=bars, **wanted)
        )
    except Exception as error:
        raise translate(repository, error, download) from error


def translate(repository: str, error: Exception, download: bool) -> QuireError:
    """Our error for one of the hub's. The order matters: a gated repository is a kind of repository not found."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return PullError(
            f"{repository} is gated: accept its terms on the hub, run `hf auth login`, and pull again. "
            f"({first_line(error)})"
        )
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return ModelNotFound(
            f"the hub has no repository {repository}, and no such file or directory is here. Check the spelling; a "
            "private repository needs `hf auth login`."
        )
    if isinstance(error, errors.LocalEntryNotFoundError) and not download:
        return ModelNotFound(
            f"{repository} is not in the hub's cache on this machine. Fetch it with `quire pull {repository}`."
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(
            f"{repository} does not fit on the disk ({error}). Free some space, or move the hub's cache with HF_HOME."
        )
    return PullError(
        f"{repository} is no path on this machine, and the hub could not be reached for it ({first_line(error)}). "
        "Check the network and pull again, or copy the model's directory (config.json, tokenizer and *.safetensors) "
        "here and give its path."
    )


def first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def reporting_bars(repository: str, progress: Progress) -> Any:
    """A tqdm class for the hub, which insists on one: it reports bytes to `progress` and draws nothing."""
    from huggingface_hub.utils.tqdm import tqdm

    def start(bar: Any, *args: Any, **options: Any) -> None:
        tqdm.__init__(bar, *args, **{**options, "file": io.StringIO(), "disable": False})  # type: ignore[no-untyped-call, unused-ignore]

    def report(bar: Any, *args: Any, **options: Any) -> None:
        if bar.unit == "B":
            progress(f"fetching {repository}", int(bar.n), int(bar.total) if bar.total else None)

    return type("ReportingBar", (tqdm,), {"__init__": start, "display": report})
