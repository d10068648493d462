"""Uploads a step's buffers from the host to the device in one launch, instead of a copy for each.

The kernel reads pinned memory across the bus. The buffers are small, so one copy would take as long as the kernel does
for all of them. The kernel is launched without PDL: later kernels of the step read what
it uploads, and what earlier steps wrote, before they wait for the kernel before them (`pdl.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WORD = 4  # bytes: the unit of all copies
CHUNK = 1024  # words a program
FIELDS = tl.constexpr(5)


@triton.jit(do_not_specialize=["first"])
def _upload(copies, first, CHUNK: tl.constexpr):
    copy = copies + (first + tl.program_id(0)) * FIELDS
    source = tl.load(copy).to(tl.pointer_type(tl.int32))
    target = tl.load(copy + 1).to(tl.pointer_type(tl.int32))
    rows = tl.load(copy + 2).to(tl.int32)
    words = tl.load(copy + 3).to(tl.int32)
    stride = tl.load(copy + 4).to(tl.int32)
    nth = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = nth < rows * words
    offset = nth // words * stride + nth % words
    tl.store(target + offset, tl.load(source + offset, mask=inside), mask=inside)


def compile_upload(copies: Tensor) -> None:
    _upload[(1, 1)](copies, 0, CHUNK=CHUNK, num_warps=4)


class Upload:
    """A list of copies: source, target, rows, words a row, and row stride. `clear` waits until they have been made."""

    def __init__(self, most: int) -> None:
        self._copies = torch.zeros(most, FIELDS.value, dtype=torch.int64, pin_memory=True)
        self._rows = self._copies.numpy()
        self._sent = self._count = self._most_words = 0
        self._done: torch.cuda.Event | None = None  # of the last launch

    def add(self, source: Tensor, target: Tensor, first: int, last: int, width: int | None = None) -> None:
        """Add a copy of source[first:last] to target[first:last]; with `width`, only of the first `width` columns."""
        words = source.element_size() // WORD
        stride = source.stride(0) * words
        rows, each = (1, (last - first) * stride) if width is None else (last - first, width * words)
        offset = first * stride * WORD
        self._rows[self._count] = source.data_ptr() + offset, target.data_ptr() + offset, rows, each, stride
        self._count += 1
        self._most_words = max(self._most_words, rows * each)

    def send(self) -> None:
        if self._most_words:
            num_copies, chunks = self._count - self._sent, triton.cdiv(self._most_words, CHUNK)
            _upload[(num_copies, chunks)](self._copies, self._sent, CHUNK=CHUNK, num_warps=4)
            self._done = self._done or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()
        self._sent, self._most_words = self._count, 0

    def clear(self) -> None:
        if self._done is not None:
            self._done.synchronize()
        self._sent = self._count = 0
