"""Buffers: a step's input arrays on the device with their copies on the host. They are reused by every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from quire.kernels.arrays import Array, Arrays, Shape

MAX_VIEWS = 256  # kept for a buffer, one for each size of a step
TABLE_UNIT = 16  # a table's width is a multiple of this: kernels are compiled for that


class Uploader(Protocol):
    """Copies buffers to a device: `add` each, `send` all, and `clear` before the host overwrites them."""

    def add(self, source: Array, target: Array, first: int, last: int, width: int | None = None) -> None: ...

    def send(self) -> None: ...

    def clear(self) -> None:
        """Wait until the copies have ended."""
        ...


class DirectUploader:
    """An Uploader that starts each copy in `add`."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays

    def add(self, source: Array, target: Array, first: int, last: int, width: int | None = None) -> None:
        """Copies whole rows: a slice of columns is not contiguous."""
        self._arrays.copy(target[first:last], source[first:last])

    def send(self) -> None:
        pass

    def clear(self) -> None:
        self._arrays.synchronize()


class Buffer:
    """An array on the device and a numpy array on the host. On a CPU they share memory."""

    def __init__(self, shape: Shape, dtype: str, arrays: Arrays, uploader: Uploader) -> None:
        self._on_host = arrays.host_empty(shape, dtype)
        self._on_device = self._on_host if arrays.device == "cpu" else arrays.zeros(shape, dtype)
        self._views: dict[Shape, Array] = {}
        self._uploader = uploader
        self.host = np.asarray(self._on_host)
        self.host[...] = 0

    def upload(self, size: int) -> Array:
        """Add the first `size` rows to the uploader, and return their view on the device."""
        self.upload_rows(0, size)
        return self.view(size)

    def upload_rows(self, first: int, last: int, width: int | None = None) -> None:
        if self._on_device is not self._on_host:
            self._uploader.add(self._on_host, self._on_device, first, last, width)

    def view(self, *sizes: int) -> Array:
        """The first rows (and columns) on the device. Views are cached by size."""
        view = self._views.get(sizes)
        if view is None:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            view = self._views[sizes] = self._on_device[tuple(map(slice, sizes))]
        return view


class TableBuffer:
    """The block tables of a step's rows. A row that had the same request in the last step gets only its new blocks."""

    def __init__(self, max_rows: int, max_blocks: int, arrays: Arrays, uploader: Uploader) -> None:
        width = -(-max_blocks // TABLE_UNIT) * TABLE_UNIT
        self.buffer = Buffer((max_rows, width), "int32", arrays, uploader)
        self._kept: list[list[int | None]] = [[] for _ in range(max_rows)]
        self._changed: list[int] = []  # rows, since the last upload

    def fill(self, row: int, blocks: Sequence[int | None]) -> None:
        kept = self._kept[row]
        if kept == blocks:
            return
        same = len(kept) if kept == blocks[: len(kept)] else 0
        self.buffer.host[row, same : len(blocks)] = [block or 0 for block in blocks[same:]]
        self._kept[row] = list(blocks)
        self._changed.append(row)

    def upload(self, num_rows: int, num_blocks: int) -> Array:
        """The tables of the first rows, in whole units. Uploads the range from the first to the last changed row."""
        if self._changed:
            widest = max(len(self._kept[row]) for row in self._changed)
            self.buffer.upload_rows(min(self._changed), max(self._changed) + 1, widest)
            self._changed.clear()
        return self.buffer.view(num_rows, -(-num_blocks // TABLE_UNIT) * TABLE_UNIT)

    def reset(self) -> None:
        """Upload every row at its next fill: an upload may have been dropped."""
        self._kept = [[] for _ in self._kept]
        self._changed.clear()
