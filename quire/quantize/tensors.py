"""Tensors on their way to a file, and safetensors files that are written tensor by tensor.

The library's writer takes numpy types only, and bfloat16 and float8 are none. `job.py` keeps the tensors of a finished
step in such a file too, so that a killed job can resume.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from quire.weights.safetensors import NUMPY_TYPES, StoredTensor, read_header

Floats = NDArray[np.float32]
ALIGNMENT = 8
COPY_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as a file has it. `dtype` is in safetensors' notation, or the name of a GGML type.

    `shape` is the tensor's own. Blocks of a GGML type are bytes [rows, row_bytes].
    """

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[Any]

    @classmethod
    def of(cls, data: NDArray[Any], dtype: str) -> Tensor:
        return cls(dtype, data.shape, np.ascontiguousarray(data))


def dense_tensor(values: Floats, dtype: str) -> Tensor:
    """Float32 values rounded to F32, F16 or BF16."""
    if dtype == "BF16":
        return Tensor.of(to_bfloat16(values), "BF16")
    return Tensor.of(values.astype({"F32": "<f4", "F16": "<f2"}[dtype]), dtype)


def to_bfloat16(values: Floats) -> NDArray[np.uint16]:
    """To the nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bfloat16(values: NDArray[np.uint16]) -> Floats:
    return (values.astype(np.uint32) << 16).view(np.float32)


def rounded(values: Floats, dtype: str) -> Floats:
    """The values that a tensor of that type has."""
    if dtype == "BF16":
        return from_bfloat16(to_bfloat16(values))
    return values.astype(np.float16).astype(np.float32) if dtype == "F16" else values


def write_step(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> None:
    """The tensors of a step and what the report needs of it. The file appears under its name when it is complete."""
    raw = {
        name: Tensor("U8", (tensor.data.nbytes,), tensor.data.reshape(-1).view(np.uint8))
        for name, tensor in tensors.items()
    }
    described = {name: [tensor.dtype, tensor.shape] for name, tensor in tensors.items()}
    partial = path.with_suffix(".part")
    with partial.open("wb") as file:
        write_tensors(file, raw, {"tensors": json.dumps(described), "notes": json.dumps(notes)})
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def write_array(path: Path, values: Floats) -> None:
    """A .npy file. `np.save` says of a full disk only how many values it has written."""
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(values))
        file.write(values.data.cast("B"))
        file.flush()
        os.fsync(file.fileno())


class StepFile:
    """A file that `write_step` wrote."""

    def __init__(self, path: Path) -> None:
        self._stored = read_header(path)
        metadata = read_metadata(path)
        self.tensors: dict[str, tuple[str, tuple[int, ...]]] = {
            name: (dtype, tuple(shape)) for name, (dtype, shape) in json.loads(metadata["tensors"]).items()
        }
        self.notes: dict[str, Any] = json.loads(metadata["notes"])

    def nbytes(self, name: str) -> int:
        return self._stored[name].nbytes

    def copy(self, name: str, target: BinaryIO) -> None:
        """Append the bytes of a tensor to a file."""
        stored: StoredTensor = self._stored[name]
        with stored.file.open("rb") as file:
            file.seek(stored.offset)
            rest = stored.nbytes
            while rest:
                piece = file.read(min(rest, COPY_BYTES))
                assert piece, "a step's file became shorter"
                target.write(piece)
                rest -= len(piece)


def read_metadata(path: Path) -> dict[str, str]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        found: dict[str, str] = json.loads(file.read(size)).get("__metadata__", {})
    return found


def write_tensors(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    shapes = [(name, tensor.dtype, tensor.shape, tensor.data.nbytes) for name, tensor in tensors.items()]
    file.write(header_of(shapes, metadata))
    for tensor in tensors.values():
        file.write(tensor.data.data.cast("B") if tensor.data.size else b"")


def header_of(tensors: Sequence[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a safetensors file, for tensors as (name, dtype, shape, bytes) in the order of their data."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, dtype, shape, nbytes in tensors:
        assert dtype in NUMPY_TYPES, dtype
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def all_tensors(steps: Sequence[StepFile]) -> Iterator[tuple[StepFile, str, str, tuple[int, ...]]]:
    for step in steps:
        for name, (dtype, shape) in step.tensors.items():
            yield step, name, dtype, shape
