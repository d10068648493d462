"""SafetensorsFiles: the tensors of a directory, in one `model.safetensors` or in the shards of an index.

Each read opens and closes the file, so that only the tensors in use are memory-mapped. Names are those in the files.
`safetensors_checkpoint.py` calls this.
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
    """The file, the shape and the type of one tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # in safetensors' notation: F32, BF16, ...

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * ITEM_BYTES.get(self.dtype, 1)


class SafetensorsFiles:
    """The tensors of one model directory, by their names in the files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tensors: dict[str, StoredTensor] = {}
        for file, expected in find_files(directory).items():
            found = read_header(file)
            if missing := expected - found.keys():
                raise BadModelFile(
                    f"{file} lacks {len(missing)} tensors that {INDEX} lists for it, such as {min(missing)!r}. "
                    "Download it again."
                )
            self.tensors.update(found)

    def read(self, name: str) -> Tensor:
        """The tensor as it is stored. It keeps the file mapped, so copy it and drop it."""
        with opened(self.tensors[name].file) as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def read_floats(self, name: str) -> Tensor:
        """The same, of a tensor that must be of a floating point type."""
        stored = self.tensors[name]
        if stored.dtype not in FLOATS:
            raise UnsupportedModel(
                f"The tensor {name!r} in {stored.file} is of type {stored.dtype}; quire reads {', '.join(FLOATS)}."
            )
        return self.read(name)


def find_files(directory: Path) -> dict[Path, set[str]]:
    """The files of a checkpoint, each with the names of its tensors in the index, if there is an index."""
    if (directory / INDEX).is_file():
        return read_index(directory)
    if (directory / SINGLE).is_file():
        return {directory / SINGLE: set()}
    raise ModelNotFound(f"{directory} has neither {SINGLE} nor {INDEX}. Download the model again.")


def read_index(directory: Path) -> dict[Path, set[str]]:
    weight_map = read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadModelFile(f"{directory / INDEX} has no weight_map. Download it again.")
    files: dict[Path, set[str]] = {}
    for tensor, shard in weight_map.items():
        files.setdefault(shard_path(directory, shard), set()).add(tensor)
    return files


def shard_path(directory: Path, shard: object) -> Path:
    """The shard's path, which must be a file directly in the model's directory."""
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
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            view = file.get_slice(name)
            tensors[name] = StoredTensor(path, tuple(view.get_shape()), view.get_dtype())
    return tensors


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """The file, opened by the safetensors library. Its errors are raised as BadModelFile."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, ValueError) as error:
        raise BadModelFile(f"{path} is not a usable safetensors file: {error}. Download it again.") from None
