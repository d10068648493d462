"""SafetensorsFiles: the tensors of a directory, in one `model.safetensors` or in the shards of an index.

`read_header` checks a file: its tensors fill it without holes and do not overlap. Tensors are read as numpy arrays from
the offsets in the header. Each read maps its tensor only. Names are those in the files.
`safetensors_checkpoint.py` calls this.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from io import SEEK_END
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.errors import BadModelFile, ModelNotFound, UnsupportedModel
from quire.weights.fields import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_VALUES = 2**48
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
    """The file's tensors."""
    try:
        with path.open("rb") as file:
            num_bytes = file.seek(0, SEEK_END)
            file.seek(0)
            size = int.from_bytes(file.read(8), "little")
            if num_bytes < 8 or size > num_bytes - 8:
                raise ValueError(f"its header would be {size} bytes long, and the file has {num_bytes}")
            if size > MAX_HEADER_BYTES:
                raise ValueError(f"its header would be {size} bytes long, and at most {MAX_HEADER_BYTES} are read")
            header = json.loads(file.read(size).decode(), object_pairs_hook=without_duplicates)
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        header.pop("__metadata__", None)
        tensors = {name: read_entry(path, name, entry, 8 + size) for name, entry in header.items()}
        check_offsets(tensors, 8 + size, num_bytes)
    except (OSError, ValueError, RecursionError) as error:
        raise unusable(path, error) from None
    return {name: tensor for name, (tensor, _) in tensors.items()}


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name occurs twice in its header")
    return values


def read_entry(path: Path, name: str, entry: Any, data_at: int) -> tuple[StoredTensor, int]:
    """A tensor, and where it ends in the file."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]}:
            pass
        case _:
            raise ValueError(f"the header's entry of {name!r} lacks a dtype, a shape or two data_offsets")
    if any(type(value) is not int or value < 0 for value in (*shape, begin, end)) or begin > end:
        raise ValueError(f"the shape or the offsets of {name!r} are no sizes")
    if prod(max(dim, 1) for dim in shape) > MAX_VALUES:
        raise ValueError(f"the shape of {name!r}, {shape}, has more than {MAX_VALUES} values")
    tensor = StoredTensor(path, tuple(shape), dtype, data_at + begin)
    if dtype in NUMPY_TYPES and tensor.nbytes != end - begin:
        raise ValueError(f"{name!r} has {end - begin} bytes instead of the {tensor.nbytes} of its shape {shape}")
    return tensor, data_at + end


def check_offsets(tensors: Mapping[str, tuple[StoredTensor, int]], begin: int, num_bytes: int) -> None:
    """Every byte behind the header belongs to one tensor."""
    at = begin
    for offset, end, name in sorted((tensor.offset, end, name) for name, (tensor, end) in tensors.items()):
        if offset != at:
            raise ValueError(f"{name!r} begins at byte {offset}, and the tensor before it ends at {at}")
        at = end
    if at != num_bytes:
        raise ValueError(f"its tensors end at byte {at}, and the file has {num_bytes}")


def unusable(path: Path, error: Exception) -> BadModelFile:
    return BadModelFile(f"{path} is not a usable safetensors file: {error}. Download it again.")
