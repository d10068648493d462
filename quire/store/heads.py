"""Draft heads in the store: one directory a model and kind, beside the models. There is no download of them yet:
`quire train-draft --out store` writes them, and a head that somebody else has trained can be copied there."""

from __future__ import annotations

import re
from pathlib import Path

from quire.config import cache_dir
from quire.errors import ModelNotFound
from quire.store.aliases import ALIASES, WheelModel

STORED = "store"  # in place of a directory: the head of this model in the store


def head_directory(model: str, kind: str) -> Path:
    """Where the store keeps a head: by the name of the model's file or folder. An alias of a single file and that file
    have the same. Of two models with one name the second cannot use the first one's: heads know their target."""
    alias, path = ALIASES.get(model), Path(model).expanduser()
    name = path.resolve().name if path.exists() else path.name
    name = alias.file if isinstance(alias, WheelModel) else name
    return cache_dir() / "heads" / re.sub(r"[^A-Za-z0-9._-]+", "-", name.removesuffix(".gguf")) / kind


def find_head(value: str, model: str, kind: str, field: str) -> Path:
    """The directory of a head that the option `field` names by its path, or as that of the store."""
    directory = head_directory(model, kind) if value == STORED else Path(value).expanduser()
    if directory.is_dir():
        return directory
    if value == STORED:
        raise ModelNotFound(
            f"{field} names the {kind} head of {model} in the store, and there is none in {directory}. Train it with "
            f"`quire train-draft {model} --kind {kind} --out store`, or name a directory."
        )
    raise ModelNotFound(f"{field} names the head {directory}, which is not a directory. Check the path.")
