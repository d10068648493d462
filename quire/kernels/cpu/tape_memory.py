"""Where the values of a tape lie: memory that is shared out while ops are recorded, and mapped when the tape is done.

`tape.py` hands slots out and takes memory back; `tape_ops.py` asks them for addresses.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

SPARE_ROWS = 16  # behind the last row, that kernels may read
HUGE_PAGE = 1 << 21
NOWHERE = (0, 0)

View = tuple[int, int]


class Memory:
    """Rows of one width, float32 or int8 with scales. Its address is known once the tape is finished."""

    def __init__(self, width: int, row_bytes: int) -> None:
        self.width = width
        self.row_bytes = row_bytes
        self.tensor: Tensor | None = None

    def allocate(self, rows: int) -> None:
        self.tensor = huge_pages((rows + SPARE_ROWS) * self.row_bytes)

    @property
    def address(self) -> int:
        assert self.tensor is not None
        return self.tensor.data_ptr()


class Slot:
    """A buffer's claim to memory. Only what an op reads is needed; what is not needed is never written."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.needed = False

    def view(self, first: int = 0) -> View:
        """Where column `first` begins and how many floats lie between two rows."""
        return (self.memory.address + 4 * first, self.memory.row_bytes // 4) if self.needed else NOWHERE

    def quantized(self) -> View:
        """Where the rows begin, and their columns."""
        return (self.memory.address, self.memory.width) if self.needed else NOWHERE


@dataclass(frozen=True, slots=True)
class Reader:
    """Columns of a slot from `first` on."""

    slot: Slot
    first: int = 0

    def view(self) -> View:
        return self.slot.view(self.first)


def padded(width: int) -> int:
    """Floats between two rows: whole cache lines, and not so many that rows fall onto the same ones."""
    return -(-width // 16) * 16 + 16


def huge_pages(num_bytes: int) -> Tensor:
    """Bytes of zeros at a multiple of 2 MiB, in large pages where the system has them; unused ones cost nothing."""
    pages = mmap.mmap(-1, num_bytes + HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE") and num_bytes >= HUGE_PAGE:
        pages.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    skip = -whole.data_ptr() % HUGE_PAGE
    return whole[skip : skip + num_bytes]
