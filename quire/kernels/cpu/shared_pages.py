"""SharedPages: a file in memory that the ranks map, and SharedArrays, the arrays of a batch in it.

`ranks.py` allocates what all ranks share, a tape its gathered values, and rank 0 its batches.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np
from numpy.typing import NDArray

from quire.kernels.arrays import Array, NumpyArrays, Shape, numpy_type

FILE_BYTES = 1 << 38  # of address space; a page takes memory when it is first written
MAP_UNIT = 1 << 16  # a multiple of every system's pages

Bytes = NDArray[np.uint8]


class SharedPages:
    """A file in memory that the ranks map. Each allocates the same sizes in the same order. Afterwards rank 0 may
    allocate more, which the others see through `map_all`."""

    def __init__(self, file: int) -> None:
        self.file = file
        self.num_bytes = 0  # allocated
        self._offsets: dict[int, int] = {}  # in the file, by address

    @classmethod
    def create(cls) -> SharedPages:
        file = create_file()
        os.ftruncate(file, FILE_BYTES)
        return cls(file)

    def allocate(self, num_bytes: int) -> Bytes:
        """Zeroed bytes, the same for all ranks."""
        offset, size = self.num_bytes, -(-num_bytes // MAP_UNIT) * MAP_UNIT
        self.num_bytes += size
        data = self._map(offset, size)[:num_bytes]
        self._offsets[data.ctypes.data] = offset
        return data

    def array(self, shape: Shape, dtype: str) -> Array:
        kind = numpy_type(dtype)
        return (
            self.allocate(max(1, int(np.prod(shape)) * kind.itemsize)).view(kind)[: int(np.prod(shape))].reshape(shape)
        )

    def offset_of(self, address: int) -> int:
        """Of memory that begins an allocation; the null address has the offset 0."""
        return self._offsets[address] if address else 0

    def map_all(self, num_bytes: int) -> Bytes:
        """All that rank 0 has allocated, once more: a byte's index is its offset."""
        return self._map(0, num_bytes)

    def _map(self, offset: int, size: int) -> Bytes:
        return np.frombuffer(mmap.mmap(self.file, size, flags=mmap.MAP_SHARED, offset=offset), np.uint8)

    def close(self) -> None:
        """Maps stay valid."""
        os.close(self.file)


def create_file() -> int:
    """A file that no other process can open by name. Only Linux has memory files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("quire-ranks", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class SharedArrays(NumpyArrays):
    """The arrays of a batch lie in shared pages: a plan is there for all ranks when rank 0 has filled it."""

    def __init__(self, pages: SharedPages) -> None:
        self._pages = pages

    def host_empty(self, shape: Shape, dtype: str) -> Array:
        return self._pages.array(shape, dtype)
