"""Buffers: tensors of a step on the device and their numbers on the host. They are made once and filled anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

MAX_VIEWS = 256  # of a buffer, one for each size of a step
TABLE_UNIT = 16  # a table is so many entries wide, or a multiple: kernels are compiled for that


class Uploader(Protocol):
    """How buffers get to a device: each is put in, then all are sent, and cleared away when they have arrived."""

    def put(self, source: Tensor, target: Tensor, first: int, last: int, width: int | None = None) -> None: ...

    def send(self) -> None: ...

    def clear(self) -> None: ...


class DirectUploader:
    """An Uploader that copies each buffer by itself, and at once."""

    def put(self, source: Tensor, target: Tensor, first: int, last: int, width: int | None = None) -> None:
        target[first:last].copy_(source[first:last], non_blocking=True)  # whole rows: others cannot be copied at once

    def send(self) -> None:
        pass

    def clear(self) -> None:
        pass


class Buffer:
    """A tensor on the device and a numpy array on the host; on the CPU they are the same memory."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, uploader: Uploader) -> None:
        self._on_host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self._on_device = self._on_host if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        self._views: dict[tuple[int, ...], Tensor] = {}
        self._outbox = uploader
        self.host = self._on_host.numpy()

    def send(self, size: int) -> Tensor:
        """The leading part of the buffer, on the device once the uploader is sent."""
        self.send_rows(0, size)
        return self.view(size)

    def send_rows(self, first: int, last: int, width: int | None = None) -> None:
        if self._on_device is not self._on_host:
            self._outbox.put(self._on_host, self._on_device, first, last, width)

    def view(self, *sizes: int) -> Tensor:
        """The leading part on the device as it is. Steps of one size come often, so views are kept."""
        view = self._views.get(sizes)
        if view is None:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            view = self._views[sizes] = self._on_device[tuple(map(slice, sizes))]
        return view


class TableBuffer:
    """The block tables of a step's rows. A row that goes on from the last step only has its new blocks written."""

    def __init__(self, max_rows: int, max_blocks: int, device: torch.device, uploader: Uploader) -> None:
        width = -(-max_blocks // TABLE_UNIT) * TABLE_UNIT
        self.buffer = Buffer((max_rows, width), torch.int32, device, uploader)
        self._kept: list[list[int | None]] = [[] for _ in range(max_rows)]
        self._changed: list[int] = []  # rows, since the last sending

    def fill(self, row: int, blocks: Sequence[int | None]) -> None:
        kept = self._kept[row]
        if kept == blocks:
            return
        same = len(kept) if kept == blocks[: len(kept)] else 0
        self.buffer.host[row, same : len(blocks)] = [block or 0 for block in blocks[same:]]
        self._kept[row] = list(blocks)
        self._changed.append(row)

    def send(self, num_rows: int, num_blocks: int) -> Tensor:
        """The tables of the first rows; only what lies between the first and the last changed one is sent."""
        if self._changed:
            widest = max(len(self._kept[row]) for row in self._changed)
            self.buffer.send_rows(min(self._changed), max(self._changed) + 1, widest)
            self._changed.clear()
        return self.buffer.view(num_rows, num_blocks)
