"""SafetensorsFiles: the tensors of a directory, in one `model.safetensors` or in the shards of an index.

A tensor is read when it is asked for, from a file that is opened for it and closed after: so no more than one tensor is
ever mapped. `checkpoint.py` calls this; names are the file's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.errors import BadModelFile, ModelNotFound, UnsupportedModel
from quire.weights.fields import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies and what it is."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors writes it: F32, BF16, ...

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * ITEM_BYTES.get(self.dtype, 1)


class SafetensorsFiles:
    """The tensors of one model directory, by the names that the files give them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tensors: dict[str, StoredTensor] = {}
        for file, expected in find_files(directory).items():
            found = read_header(file)
            if missing := expected - found.keys():
                raise BadModelFile(
                    f"{file} lacks {len(missing)} tensors that {INDEX} places there, such as {min(missing)!r}. "
                    "Download it again."
                )
            self.tensors.update(found)

    def read(self, name: str) -> Tensor:
        """The tensor as it is stored. It refers to the mapped file, so copy it and let it go."""
        with opened(self.tensors[name].file) as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def read_floats(self, name: str) -> Tensor:
        """The same, of a tensor that holds the numbers themselves."""
        stored = self.tensors[name]
        if stored.dtype not in FLOATS:
            raise UnsupportedModel(
                f"The tensor {name!r} in {stored.file} is of type {stored.dtype}; quire reads {', '.join(FLOATS)}."
            )
        return self.read(name)


def find_files(directory: Path) -> dict[Path, set[str]]:
    """The files of a checkpoint, each with the tensors that it must hold (none are named without an index)."""
    if (directory / INDEX).is_file():
        return read_index(directory)
    if (directory / SINGLE).is_file():
        return {directory / SINGLE: set()}
    raise ModelNotFound(f"{directory} has neither {SINGLE} nor {INDEX}. Check that the model was downloaded whole.")


def read_index(directory: Path) -> dict[Path, set[str]]:
    weight_map = read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadModelFile(f"{directory / INDEX} has no weight_map. Download it again.")
    files: dict[Path, set[str]] = {}
    for tensor, shard in weight_map.items():
        files.setdefault(shard_path(directory, shard), set()).add(tensor)
    return files


def shard_path(directory: Path, shard: object) -> Path:
    """The shard's path, which must be a file right in the model's directory."""
    if not isinstance(shard, str) or shard in ("", ".", "..") or set(shard) & set("/\\:\0"):
        raise BadModelFile(
            f"{directory / INDEX} names the shard {shard!r}, which is not a plain file name. Do not use this model."
        )
    path = directory / shard
    if not path.is_file():
        raise BadModelFile(f"The shard {shard} that {INDEX} names is missing from {directory}. Download it again.")
    return path


def read_header(path: Path) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    with opened(path) as file:
        for name in file.keys():  # noqa: SIM118 (it is no mapping)
            part = file.get_slice(name)
            tensors[name] = StoredTensor(path, tuple(part.get_shape()), part.get_dtype())
    return tensors


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """The file as the safetensors library opens it, its errors turned into ours."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, ValueError) as error:
        raise BadModelFile(f"{path} is not a usable safetensors file: {error}. Download it again.") from None
