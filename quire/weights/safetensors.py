"""SafetensorsFiles: the tensors of a directory, in one `model.safetensors` or in the shards of an index.

The safetensors library checks each file. Tensors are read as numpy arrays from the offsets in its header, because the
library has no numpy type for bfloat16. Each read maps its tensor only. Names are those in the files.
`safetensors_checkpoint.py` calls this.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from quire.errors import BadModelFile, ModelNotFound, UnsupportedModel
from quire.weights.fields import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
# Types that numpy lacks are read as unsigned integers of the same size.
NUMPY_TYPES = {
    "F64": "<f8", "I64": "<i8", "U64": "<u8", "F32": "<f4", "I32": "<i4", "U32": "<u4", "F16": "<f2", "BF16": "<u2",
    "I16": "<i2", "U16": "<u2", "I8": "i1", "U8": "u1", "BOOL": "?", "F8_E4M3": "u1", "F8_E5M2": "u1",
    "F8_E8M0": "u1",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The file, the shape and the type of one tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # in safetensors' notation: F32, BF16, ...
    offset: int  # in the file

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * np.dtype(NUMPY_TYPES.get(self.dtype, "u1")).itemsize


class SafetensorsFiles:
    """The tensors of one model directory, by their names in the files."""

    def __init__(self, directory: Path, single: str = SINGLE) -> None:
        self.directory = directory
        self.tensors: dict[str, StoredTensor] = {}
        for file, expected in find_files(directory, single).items():
            found = read_header(file)
            if missing := expected - found.keys():
                raise BadModelFile(
                    f"{file} lacks {len(missing)} tensors that {INDEX} lists for it, such as {min(missing)!r}. "
                    "Download it again."
                )
            self.tensors.update(found)

    def read_floats(self, name: str) -> NDArray[Any]:
        """As `read`, of a tensor that must be of a floating point type."""
        return self.read(name, FLOATS)

    def read(self, name: str, kinds: Collection[str] = tuple(NUMPY_TYPES)) -> NDArray[Any]:
        """The tensor as it is stored, bfloat16 as uint16. It keeps the file mapped, so copy it and drop it."""
        stored = self.tensors[name]
        if stored.dtype not in kinds:
            raise UnsupportedModel(
                f"The tensor {name!r} in {stored.file} is of type {stored.dtype}; quire reads {', '.join(kinds)}."
            )
        if 0 in stored.shape:
            return np.empty(stored.shape, NUMPY_TYPES[stored.dtype])
        try:
            # Copy on write: torch warns about arrays that it could not write to.
            mapped = np.memmap(stored.file, NUMPY_TYPES[stored.dtype], "c", stored.offset, stored.shape)
        except (OSError, ValueError) as error:
            raise unusable(stored.file, error) from None
        return mapped if mapped.flags.aligned else mapped.copy()  # a header of odd length displaces all tensors


def find_files(directory: Path, single: str = SINGLE) -> dict[Path, set[str]]:
    """The files of a checkpoint, each with the names of its tensors in the index, if there is an index."""
    if (directory / INDEX).is_file():
        return read_index(directory)
    if (directory / single).is_file():
        return {directory / single: set()}
    raise ModelNotFound(f"{directory} has neither {single} nor {INDEX}. Download the model again.")


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
    """The file's tensors. The library has checked that their offsets are inside the file and do not overlap."""
    try:
        with safe_open(path, framework="numpy"):
            pass
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(size))
    except (SafetensorError, OSError, ValueError) as error:
        raise unusable(path, error) from None
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(path, tuple(entry["shape"]), entry["dtype"], 8 + size + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def unusable(path: Path, error: Exception) -> BadModelFile:
    return BadModelFile(f"{path} is not a usable safetensors file: {error}. Download it again.")
