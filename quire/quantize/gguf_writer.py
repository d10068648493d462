"""Writes GGUF files. Metadata entries are bytes: a type and a value, copied from another file or made by `entry`."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from quire.quant.ggml_types import GGMLType
from quire.weights.gguf import MAGIC

VERSION = 3
ALIGNMENT = 32
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor, with its shape in torch's order. `write` appends its bytes to the file."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    nbytes: int
    write: Callable[[BinaryIO], None]


def entry(value: Any) -> bytes:
    """The type and the value of an entry: bool, int (uint32), float (float32), str, or a list of str, int or float."""
    kind, data = typed(value)
    return struct.pack("<I", kind) + data


def typed(value: Any) -> tuple[int, bytes]:
    match value:
        case bool():
            return BOOL, bytes([value])
        case int():
            return UINT32, struct.pack("<I", value)
        case float():
            return FLOAT32, struct.pack("<f", value)
        case str():
            return STRING, text(value)
        case list():
            return ARRAY, array(value)
    raise TypeError(f"a GGUF entry of {type(value).__name__}")


def array(values: Sequence[Any]) -> bytes:
    """Numbers are int32, as token types are, or float32."""
    if values and isinstance(values[0], str):
        return struct.pack("<IQ", STRING, len(values)) + b"".join(map(text, values))
    if values and isinstance(values[0], float):
        return struct.pack("<IQ", FLOAT32, len(values)) + struct.pack(f"<{len(values)}f", *values)
    if values and isinstance(values[0], bool):
        return struct.pack("<IQ", BOOL, len(values)) + bytes(values)
    return struct.pack("<IQ", INT32, len(values)) + struct.pack(f"<{len(values)}i", *values)


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def write_gguf(path: Path, metadata: Mapping[str, bytes], tensors: Sequence[TensorEntry]) -> None:
    with path.open("wb") as file:
        file.write(MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(metadata)))
        for key, value in metadata.items():
            file.write(text(key) + value)
        at = 0
        for tensor in tensors:
            dims = struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
            file.write(text(tensor.name) + struct.pack("<I", len(tensor.shape)) + dims)
            file.write(struct.pack("<IQ", tensor.type.number, at))
            at += padded(tensor.nbytes)
        pad(file)
        for tensor in tensors:
            tensor.write(file)
            pad(file)


def padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def pad(file: BinaryIO) -> None:
    file.write(bytes(padded(file.tell()) - file.tell()))
