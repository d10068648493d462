"""Headers of safetensors files: what the safetensors library refuses is refused here too, with a reason."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from quire.errors import BadModelFile
from quire.weights.safetensors import MAX_HEADER_BYTES, read_header

pytestmark = pytest.mark.cpu

TENSORS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros((0, 4), np.int8), "c": np.ones(3, np.uint8)}


def write(path: Path, header: object, data: bytes = bytes(27), size: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if size is None else size).to_bytes(8, "little") + text + data)
    return path


def entry(begin: object = 0, end: object = 27, shape: object = (27,), dtype: object = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"{", "Expecting property name"),
        (b"[]", "no JSON object"),
        (b"\xff\xfe\xfd", "decode|Expecting"),
        ("{}".encode("utf-16"), "decode"),
        (b"[" * 100_000, "recursion"),
        (b'{"a":1,"a":2}', "twice"),
        ({"a": [1]}, "entry of 'a' lacks"),
        ({"a": {"dtype": "U8", "shape": [27]}}, "entry of 'a' lacks"),
        ({"a": entry(shape=[27.0])}, "are no sizes"),
        ({"a": entry(shape=[True, 27])}, "are no sizes"),
        ({"a": entry(shape=[-27])}, "are no sizes"),
        ({"a": entry(begin=-1)}, "are no sizes"),
        ({"a": entry(begin=27, end=0)}, "are no sizes"),
        ({"a": entry(shape=[0, 2**62])}, "more than 281474976710656 values"),
        ({"a": entry(shape=[28])}, "27 bytes instead of the 28"),
        ({"a": entry(dtype="F32")}, "27 bytes instead of the 108"),
        ({"a": entry(end=26, shape=[26])}, "end at byte .*, and the file has"),
        ({"a": entry(end=28, shape=[28])}, "end at byte .*, and the file has"),
        ({"a": entry(begin=1, shape=[26])}, "begins at byte"),
        ({"a": entry(end=20, shape=[20]), "b": entry(begin=19, shape=[8])}, "'b' begins at byte"),
        ({}, "end at byte"),
    ],
)
def test_headers_that_are_refused(tmp_path: Path, header: object, words: str) -> None:
    path = write(tmp_path / "model.safetensors", header)
    with pytest.raises(BadModelFile, match=f"not a usable safetensors file.*({words})"):
        read_header(path)


@pytest.mark.parametrize("size", [MAX_HEADER_BYTES + 1, 2**63, 30, 3])
def test_a_header_beyond_the_file(tmp_path: Path, size: int) -> None:
    path = write(tmp_path / "model.safetensors", b"{}", b"", size)
    with pytest.raises(BadModelFile, match=f"header would be {size} bytes long, and the file has 10"):
        read_header(path)


@pytest.mark.parametrize("size", [0, 7])
def test_a_file_without_a_header(tmp_path: Path, size: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(size))
    with pytest.raises(BadModelFile, match=f"header would be 0 bytes long, and the file has {size}"):
        read_header(path)


def test_a_large_header_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(2 * MAX_HEADER_BYTES)
    with pytest.raises(BadModelFile, match="header would be 100000001 bytes long, and at most 100000000 are read"):
        read_header(path)


def library_reads(path: Path) -> bool:
    try:
        with safe_open(path, framework="numpy"):
            return True
    except (SafetensorError, OSError):
        return False


def test_the_library_agrees_about_files_with_random_damage(tmp_path: Path) -> None:
    """A type that the library does not know is no damage here: whoever reads such a tensor is told so."""
    whole, draw, path = save(TENSORS, {"made": "here"}), random.Random(16), tmp_path / "model.safetensors"
    refused = 0
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(draw.choice((0, 1, 1, 2))):
            data[draw.randrange(len(data))] = draw.choice(b'0123456789[]{},:"-.e abU\x00\xff')
        del data[draw.choice((len(data), len(data), draw.randrange(len(data)))) :]
        path.write_bytes(data)
        try:
            types = {tensor.dtype for tensor in read_header(path).values()}
        except BadModelFile:
            refused += 1
            continue
        assert library_reads(path) or not types <= {"F32", "I8", "U8"}, bytes(data)
    assert 1000 < refused < 1900


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(save(TENSORS))
    found = read_header(path)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()} == {
        "a": ("F32", (2, 3)), "b": ("I8", (0, 4)), "c": ("U8", (3,)),
    }  # fmt: skip
