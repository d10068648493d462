"""GGUFFile: the metadata and tensors of a memory-mapped GGUF file. Loads no torch, and numpy only for tensors.

Every count, length, offset and type is checked against the file's size before use, so a damaged or malicious file
raises `BadModelFile` and allocates no memory. `quant/gguf_blocks.py` unpacks tensors; `gguf_config.py` and `text/`
interpret the metadata.
"""

from __future__ import annotations

import errno
import mmap
import struct
import sys
from array import array
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.errors import BadModelFile, ModelNotFound, NotEnoughMemory
from quire.quant.ggml_types import TYPES_BY_NUMBER, GGMLType
from quire.weights.gguf_strings import U64, Strings, skip

if TYPE_CHECKING:
    from types import TracebackType

    import numpy as np

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_ARRAY_DEPTH = 4
MIN_ENTRY_BYTES = 8 + 4 + 1  # an empty key, its type, one byte of value
MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # an empty name, one dimension, type, offset

U32 = struct.Struct("<I")
BOOL, STRING, ARRAY = 7, 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "B", 10: "Q", 11: "q", 12: "d"}  # typecodes
RETRY = "Download it again."


class TensorInfo(NamedTuple):
    """The location and type of one tensor. `shape` is in torch's order: (out, in), the last dimension contiguous."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int  # from the start of the file
    nbytes: int

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def cols(self) -> int:
        return self.shape[-1]


class GGUFFile:
    """An open GGUF file. Use as a context manager, or call `close()`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = map_file(path)
        header = Header(path, self._map)
        self.metadata: dict[str, Any] = header.metadata
        self._entries = header.entries
        self.tensors: dict[str, TensorInfo] = header.tensors
        self._drop_pages(0, header.data_start)

    def raw(self, name: str) -> Bytes:
        """A read-only view of the tensor's bytes in the file: [rows, row_bytes]."""
        import numpy as np

        info = self.tensors[name]
        data = np.frombuffer(self._map, np.uint8, info.nbytes, info.offset)
        return data.reshape(info.rows, -1)

    def read(self, name: str, rows: slice) -> Bytes:
        """A copy of some rows. Not through the memory map, whose pages would count as memory of this process."""
        import numpy as np

        info = self.tensors[name]
        row_bytes = info.nbytes // info.rows
        data = np.empty((rows.stop - rows.start, row_bytes), np.uint8)
        with self.path.open("rb", buffering=0) as file:
            file.seek(info.offset + rows.start * row_bytes)
            rest = data.data.cast("B")
            while rest:
                if (count := file.readinto(rest)) == 0:
                    raise unusable(self.path, f"it became shorter while {name!r} was read")
                rest = rest[count:]
        return data

    def raw_metadata(self, key: str) -> bytes:
        """The type and the value of a metadata entry, as they are stored."""
        entry = self._entries[key]
        return self._map[entry.start : entry.stop]

    def close(self) -> None:
        """Release the file. Arrays from `raw` stay valid, because they keep the map open."""
        del self._map

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _drop_pages(self, start: int, end: int) -> None:
        """Release the mapped pages of these bytes."""
        first = start - start % mmap.PAGESIZE
        end = min(end, len(self._map))
        if end > first and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)


def map_file(path: Path) -> mmap.mmap:
    """Map a file read-only."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelNotFound(f"There is no file {path}. Check the path, or use the model's name.") from None
    except ValueError:
        raise BadModelFile(f"{path} is empty (0 bytes). Download it again.") from None
    except OSError as error:
        if error.errno == errno.ENOMEM:
            size = path.stat().st_size
            raise NotEnoughMemory(f"{path} has {size:,} bytes, more than this process may map (ulimit -v).") from None
        raise BadModelFile(f"{path} cannot be read: {error.strerror}. Give a GGUF file that you may read.") from None


def unusable(path: Path, problem: str, fix: str = RETRY) -> BadModelFile:
    return BadModelFile(f"{path} is not a usable GGUF file: {problem}. {fix}")


class Header:
    """Reads everything before the tensor data, from start to end. `at`, the current offset, never exceeds the size."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0
        self.what = "the header"
        self.entries: dict[str, range] = {}  # where the type and the value of each metadata entry are
        self._check_magic_and_version()
        num_tensors = self._count("tensors", MIN_TENSOR_BYTES)
        num_entries = self._count("metadata entries", MIN_ENTRY_BYTES)
        self.metadata = self._read_metadata(num_entries)
        self.alignment = self._checked_alignment()
        tensors = self._read_tensors(num_tensors)
        self.data_start = -(-self.at // self.alignment) * self.alignment
        self.tensors = {info.name: self._with_file_offset(info) for info in tensors.values()}
        self._check_overlap()

    def bad(self, problem: str, fix: str = RETRY) -> BadModelFile:
        return unusable(self.path, problem, fix)

    def _check_magic_and_version(self) -> None:
        magic = self.data[:4]
        if magic != MAGIC:
            raise self.bad(
                f"it starts with {magic!r} instead of {MAGIC!r}",
                "Give a .gguf file, or download it again if it is one.",
            )
        self.at = 4
        version = self._number(U32)
        if version not in VERSIONS and version & 0xFFFF == 0 and version:
            raise self.bad("it is in big-endian byte order, and quire reads little-endian files", "Convert it.")
        if version not in VERSIONS:
            raise self.bad(
                f"it has format version {version}, and quire reads versions 2 and 3", "Convert it with current tools."
            )

    def _need(self, num_bytes: int) -> None:
        if num_bytes > self.size - self.at:
            raise self.bad(f"{self.what} needs {num_bytes} bytes at offset {self.at}, but the file ends at {self.size}")

    def _number(self, form: struct.Struct) -> int:
        self._need(form.size)
        (value,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return int(value)

    def _count(self, what: str, item_bytes: int) -> int:
        """The number of items that follow, each of at least `item_bytes` bytes."""
        count = self._number(U64)
        limit = (self.size - self.at) // item_bytes
        if count > limit:
            raise self.bad(f"it announces {count} {what}, and at most {limit} fit into its {self.size} bytes")
        return count

    def _text(self, what: str) -> str:
        self.what = what
        length = self._number(U64)
        self._need(length)
        start, self.at = self.at, self.at + length
        try:
            return self.data[start : self.at].decode()
        except UnicodeDecodeError:
            raise self.bad(f"{what} at offset {start} is not valid UTF-8") from None

    def _read_metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for index in range(count):
            key = self._text(f"the key of metadata entry {index}")
            if key in metadata:
                raise self.bad(f"the metadata key {key!r} occurs twice")
            self.what = f"the value of {key!r}"
            start = self.at
            metadata[key] = self._value(self._number(U32), depth=0)
            self.entries[key] = range(start, self.at)
        return metadata

    def _value(self, kind: int, depth: int) -> Any:
        if kind == STRING:
            return self._text(self.what)
        if kind == ARRAY:
            return self._array(depth + 1)
        return self._scalars(kind, 1)[0]

    def _array(self, depth: int) -> Any:
        if depth > MAX_ARRAY_DEPTH:
            raise self.bad(f"{self.what} has arrays nested deeper than {MAX_ARRAY_DEPTH}")
        kind = self._number(U32)
        if kind == STRING:
            return self._strings(self._count("strings", U64.size))
        if kind == ARRAY:
            return [self._array(depth + 1) for _ in range(self._count("arrays", U32.size + U64.size))]
        return self._scalars(kind, self._number(U64))

    def _scalars(self, kind: int, count: int) -> array[Any] | list[bool]:
        """Numbers as an array, bools as a list."""
        typecode = SCALARS.get(kind)
        if typecode is None:
            raise self.bad(f"{self.what} has the unknown value type {kind}")
        values = array(typecode)
        self._need(count * values.itemsize)
        start, self.at = self.at, self.at + count * values.itemsize
        values.frombytes(self.data[start : self.at])
        if sys.byteorder == "big":
            values.byteswap()
        if kind != BOOL:
            return values
        if any(value > 1 for value in values):
            raise self.bad(f"{self.what} has a bool that is neither 0 nor 1")
        return list(map(bool, values))

    def _strings(self, count: int) -> Strings:
        done, end = skip(self.data, self.at, count)
        if done < count:
            raise self.bad(f"{self.what} announces {count} strings, and the file ends in string {done}")
        first, self.at, what = self.at, end, self.what
        return Strings(self.data, first, count, lambda problem: self.bad(problem.format(what)))

    def _checked_alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self.bad(f"general.alignment is {alignment!r}, which is not a power of two")
        return alignment

    def _read_tensors(self, count: int) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for index in range(count):
            info = self._read_tensor(index)
            if info.name in tensors:
                raise self.bad(f"the tensor {info.name!r} occurs twice")
            tensors[info.name] = info
        return tensors

    def _read_tensor(self, index: int) -> TensorInfo:
        name = self._text(f"the name of tensor {index}")
        self.what = f"the description of tensor {name!r}"
        num_dims = self._number(U32)
        if not 1 <= num_dims <= MAX_DIMS:
            raise self.bad(f"tensor {name!r} has {num_dims} dimensions, and 1 to {MAX_DIMS} are allowed")
        shape = tuple(self._number(U64) for _ in range(num_dims))[::-1]
        number = self._number(U32)
        kind = TYPES_BY_NUMBER.get(number)
        if kind is None:
            raise self.bad(f"tensor {name!r} has the unknown type number {number}")
        if min(shape) < 1 or shape[-1] % kind.block_size:
            raise self.bad(
                f"tensor {name!r} of type {kind.name} has shape {shape}: each dimension must be at least 1 and the "
                f"last one a multiple of {kind.block_size}"
            )
        return TensorInfo(name, shape, kind, self._number(U64), prod(shape[:-1]) * kind.row_bytes(shape[-1]))

    def _with_file_offset(self, info: TensorInfo) -> TensorInfo:
        """The tensor with its offset from the start of the file instead of the tensor data."""
        if info.offset % self.alignment:
            raise self.bad(f"tensor {info.name!r} is at offset {info.offset}, not a multiple of {self.alignment}")
        start = self.data_start + info.offset
        if start + info.nbytes > self.size:
            raise self.bad(
                f"tensor {info.name!r} with shape {info.shape} takes bytes {start} to {start + info.nbytes}, but the "
                f"file ends at {self.size}"
            )
        return TensorInfo(info.name, info.shape, info.type, start, info.nbytes)

    def _check_overlap(self) -> None:
        ordered = sorted(self.tensors.values(), key=lambda info: info.offset)
        for one, other in pairwise(ordered):
            if one.offset + one.nbytes > other.offset:
                raise self.bad(
                    f"tensors {one.name!r} and {other.name!r} overlap: one ends at {one.offset + one.nbytes}, the "
                    f"other starts at {other.offset}"
                )
