"""Writes GGUF files for tests: sound ones with `write_gguf`, broken ones out of the same pieces.

A metadata value has the type that follows from Python's: int is uint32, float is float32; also str, bool, numpy arrays,
and lists of those or of strings. `Raw` passes bytes through, for values that no sound file has.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.quant.ggml_types import GGMLType

ARRAY_TYPES = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": 7, "u8": 10, "i8": 11, "f8": 12}


@dataclass
class Raw:
    """A value's type number and its bytes, written as they are."""

    kind: int
    data: bytes


@dataclass
class Tensor:
    """A tensor's description (shape in torch's order) and its bytes."""

    type: GGMLType | int
    shape: tuple[int, ...]
    data: bytes
    offset: int | None = None  # where the description says it is; None: where it is


def tensor(array: np.ndarray, kind: GGMLType = GGMLType.F32) -> Tensor:
    """A float array as a tensor of that type; quantized types need the gguf package."""
    if kind is GGMLType.F32:
        return Tensor(kind, array.shape, array.astype("<f4").tobytes())
    import gguf

    packed = gguf.quantize(array.astype(np.float32), gguf.GGMLQuantizationType[kind.name])
    return Tensor(kind, array.shape, packed.tobytes())


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


def string(text: str | bytes) -> bytes:
    data = text if isinstance(text, bytes) else text.encode()
    return u64(len(data)) + data


def value(item: Any) -> bytes:
    """A value with its type before it."""
    match item:
        case Raw():
            return u32(item.kind) + item.data
        case bool():
            return u32(7) + bytes([item])
        case int():
            return u32(4) + u32(item)
        case float():
            return u32(6) + struct.pack("<f", item)
        case str() | bytes():
            return u32(8) + string(item)
        case np.ndarray():
            return u32(9) + u32(ARRAY_TYPES[item.dtype.str[1:]]) + u64(len(item)) + item.tobytes()
        case list() if all(isinstance(one, str) for one in item):
            return u32(9) + u32(8) + u64(len(item)) + b"".join(map(string, item))
        case list():
            return u32(9) + u32(9) + u64(len(item)) + b"".join(value(one)[4:] for one in item)
    raise TypeError(type(item))


def description(name: str | bytes, item: Tensor, offset: int) -> bytes:
    dims = b"".join(map(u64, reversed(item.shape)))
    number = item.type if isinstance(item.type, int) else item.type.number
    return (
        string(name) + u32(len(item.shape)) + dims + u32(number) + u64(offset if item.offset is None else item.offset)
    )


def gguf_bytes(
    metadata: Mapping[Any, Any] | list[tuple[Any, Any]],
    tensors: Mapping[Any, Tensor] | list[tuple[Any, Tensor]],
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    alignment: int = 32,
    num_tensors: int | None = None,
    num_entries: int | None = None,
) -> bytes:
    """A whole file. Lists of pairs can repeat a name; counts can be made to lie."""
    entries = list(metadata.items()) if isinstance(metadata, Mapping) else metadata
    items = list(tensors.items()) if isinstance(tensors, Mapping) else tensors
    head = magic + u32(version)
    head += u64(len(items) if num_tensors is None else num_tensors)
    head += u64(len(entries) if num_entries is None else num_entries)
    head += b"".join(string(key) + value(item) for key, item in entries)
    data = b""
    for name, item in items:
        head += description(name, item, len(data))
        data += padded(item.data, alignment)
    return padded(head, alignment) + data


def padded(data: bytes, alignment: int) -> bytes:
    return data + bytes(-len(data) % alignment)


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path
