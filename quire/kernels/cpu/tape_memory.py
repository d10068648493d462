"""The memory of a tape. It is assigned to buffers while ops are recorded, and mapped when the tape is finished.

`tape.py` makes storages and reuses their memory; `tape_ops.py` reads their addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire.kernels.arrays import map_pages

if TYPE_CHECKING:
    from quire.kernels.cpu.shared_pages import SharedPages

PADDING_ROWS = 16  # after the last row: kernels may read them
NULL_VIEW = (0, 0)
NULL_PART = (0, 0, 0, 0)

View = tuple[int, int]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class MemoryKind:
    """Memories of one kind replace each other."""

    width: int
    quantized: bool = False  # int8 with scales, else float32
    shared: bool = False  # by all ranks


class Memory:
    """Rows of one kind. Its address is known once the tape is finished."""

    def __init__(self, kind: MemoryKind, row_bytes: int) -> None:
        self.kind = kind
        self.width = kind.width
        self.row_bytes = row_bytes
        self.data: Bytes | None = None

    def allocate(self, rows: int, pages: SharedPages | None) -> None:
        num_bytes = (rows + PADDING_ROWS) * self.row_bytes
        if self.kind.shared:
            assert pages is not None
            self.data = pages.allocate(num_bytes)
        else:
            self.data = map_pages(num_bytes, huge=True)

    @property
    def address(self) -> int:
        assert self.data is not None
        return self.data.ctypes.data


class Storage:
    """A buffer's use of a memory, from column `first` on. It is `needed` if an op reads it. Ops do not write a storage
    that is not needed."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.first = 0
        self.needed = False

    def view(self, first: int = 0) -> View:
        """The address of column `first` in row 0, and the row stride in floats."""
        address = self.memory.address + 4 * (self.first + first) if self.needed else 0
        return (address, self.memory.row_bytes // 4) if self.needed else NULL_VIEW

    def quantized(self) -> View:
        """The address of row 0, and the number of columns."""
        return (self.memory.address, self.memory.width) if self.needed else NULL_VIEW

    def quantized_part(self, width: int) -> tuple[int, int, int, int]:
        """The same, the first column that an op writes, and how many it writes."""
        return (*self.quantized(), self.first, width) if self.needed else NULL_PART


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a storage from `first` on."""

    storage: Storage
    first: int = 0

    def view(self) -> View:
        return self.storage.view(self.first)


def padded(width: int) -> int:
    """The row stride in floats: whole cache lines, and one more, so that rows do not share cache sets."""
    return -(-width // 16) * 16 + 16
