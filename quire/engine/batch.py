"""Batch: a plan as tensors. The buffers are made once and filled anew each step; the runner is their only user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.core.plan import Plan
from quire.kernels.paging import Paging

MAX_VIEWS = 256  # of a buffer, one for each size of a step
TABLE_UNIT = 16  # a table is so many entries wide, or a multiple: kernels are compiled for that


@dataclass(slots=True)
class Batch:
    """What a model is called with for one step."""

    tokens: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    paging: Paging
    feeds: Tensor | None = None  # [rows] int32: where among the last step's tokens a row's first one is, or -1


class Outbox(Protocol):
    """How buffers get to a device: each is put in, then all are sent, and cleared away when they have arrived."""

    def put(self, source: Tensor, target: Tensor, first: int, last: int, width: int | None = None) -> None: ...

    def send(self) -> None: ...

    def clear(self) -> None: ...


class Copies:
    """An Outbox that copies each buffer by itself, and at once."""

    def put(self, source: Tensor, target: Tensor, first: int, last: int, width: int | None = None) -> None:
        target[first:last].copy_(source[first:last], non_blocking=True)  # whole rows: others cannot be copied at once

    def send(self) -> None:
        pass

    def clear(self) -> None:
        pass


class Buffer:
    """A tensor on the device and a numpy array on the host; on the CPU they are the same memory."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, outbox: Outbox) -> None:
        self._on_host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self._on_device = self._on_host if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        self._views: dict[tuple[int, ...], Tensor] = {}
        self._outbox = outbox
        self.host = self._on_host.numpy()

    def send(self, size: int) -> Tensor:
        """The leading part of the buffer, on the device once the outbox is sent."""
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

    def __init__(self, max_rows: int, max_blocks: int, device: torch.device, outbox: Outbox) -> None:
        width = -(-max_blocks // TABLE_UNIT) * TABLE_UNIT
        self.buffer = Buffer((max_rows, width), torch.int32, device, outbox)
        self._kept: list[list[int | None]] = [[] for _ in range(max_rows)]
        self._changed: list[int] = []  # rows, since the last sending

    def fill(self, row: int, blocks: list[int | None]) -> None:
        kept = self._kept[row]
        if kept == blocks:
            return
        same = len(kept) if kept == blocks[: len(kept)] else 0
        self.buffer.host[row, same : len(blocks)] = [block or 0 for block in blocks[same:]]
        self._kept[row] = blocks.copy()
        self._changed.append(row)

    def send(self, num_rows: int, num_blocks: int) -> Tensor:
        """The tables of the first rows; only what lies between the first and the last changed one is sent."""
        if self._changed:
            widest = max(len(self._kept[row]) for row in self._changed)
            self.buffer.send_rows(min(self._changed), max(self._changed) + 1, widest)
            self._changed.clear()
        return self.buffer.view(num_rows, num_blocks)


@dataclass(frozen=True, slots=True)
class BufferShape:
    """The largest step there can be. `windows` has an entry for each group of layers that has a block table."""

    max_tokens: int
    max_rows: int
    max_len: int
    windows: tuple[int | None, ...]
    block_size: int
    device: torch.device


class BatchBuffers:
    """Room for the largest step there can be."""

    def __init__(self, shape: BufferShape, outbox: Outbox | None = None) -> None:
        max_tokens, max_rows, block_size, device = shape.max_tokens, shape.max_rows, shape.block_size, shape.device
        self.outbox = outbox if outbox is not None else Copies()
        max_blocks = -(-shape.max_len // block_size)
        self.block_size = block_size
        self.max_blocks = max_blocks
        self._sent = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.feeds = Buffer((max_rows,), torch.int32, device, self.outbox)
        self.tokens = Buffer((max_tokens,), torch.int64, device, self.outbox)
        self.positions = Buffer((max_tokens,), torch.int64, device, self.outbox)
        self.query_starts = Buffer((max_rows + 1,), torch.int32, device, self.outbox)
        self.seq_lens = Buffer((max_rows,), torch.int32, device, self.outbox)
        self.tables = [TableBuffer(max_rows, max_blocks, device, self.outbox) for _ in shape.windows]
        self.slots = [Buffer((max_tokens,), torch.int64, device, self.outbox) for _ in shape.windows]

    def fill(self, plan: Plan, in_flight: Mapping[str, int] | None = None) -> Batch:
        """Lay a plan out and send it. What an earlier step left behind the parts in use is never looked at.

        `in_flight` says where among the last step's tokens a request's own is, if the host has not read it yet.
        """
        batch = self._lay_out(plan, in_flight)
        self._has_sent()
        return batch

    def _lay_out(
        self, plan: Plan, in_flight: Mapping[str, int] | None, size: int | None = None, rows: int | None = None
    ) -> Batch:
        """With a `size`, tokens that are stored nowhere fill the step up to so many; with `rows`, as many rows are
        shown, the last of which have no context."""
        self._sent_before()
        num_rows, num_tokens = len(plan), plan.num_tokens
        query_starts = list(accumulate(plan.counts, initial=0))
        seq_lens = list(map(add, plan.starts, plan.counts))
        self.query_starts.host[: num_rows + 1] = query_starts
        self.seq_lens.host[:num_rows] = seq_lens
        self._fill_positions(plan, query_starts)
        has_feeds = self._fill_tokens(plan, in_flight)
        for group in range(len(self.tables)):
            self._fill_blocks(plan, group, query_starts)
        max_blocks = -(-max(seq_lens) // self.block_size)
        if size is not None and rows is not None:
            self._pad(num_tokens, size, num_rows, rows)
            num_rows, num_tokens, max_blocks, has_feeds = rows, size, self.max_blocks, True
        return Batch(
            self.tokens.send(num_tokens),
            self.positions.send(num_tokens),
            Paging(
                self.query_starts.send(num_rows + 1),
                self.seq_lens.send(num_rows),
                [table.send(num_rows, max_blocks) for table in self.tables],
                [slots.send(num_tokens) for slots in self.slots],
                self.block_size,
                query_starts,
                seq_lens,
            ),
            self.feeds.send(num_rows) if has_feeds else None,
        )

    def _has_sent(self) -> None:
        self.outbox.send()
        if self._sent is not None:
            self._sent.record()

    def _sent_before(self) -> None:
        """What the last step was given must have left the host before it is overwritten."""
        if self._sent is not None:
            self._sent.synchronize()
        self.outbox.clear()

    def _pad(self, num_tokens: int, size: int, num_rows: int, rows: int) -> None:
        for buffer, value in ((self.tokens, 0), (self.positions, 0), *((slots, -1) for slots in self.slots)):
            buffer.host[num_tokens:size] = value
        self.seq_lens.host[num_rows:rows] = 0
        self.feeds.host[num_rows:rows] = -1
        self.query_starts.host[num_rows + 1 : rows + 1] = self.query_starts.host[num_rows]

    def _fill_positions(self, plan: Plan, query_starts: list[int]) -> None:
        if plan.num_tokens == len(plan):
            self.positions.host[: len(plan)] = plan.starts
            return
        for first, start, count in zip(query_starts, plan.starts, plan.counts, strict=False):
            self.positions.host[first : first + count] = np.arange(start, start + count)

    def _fill_tokens(self, plan: Plan, in_flight: Mapping[str, int] | None) -> bool:
        """Returns whether some are still on the device."""
        tokens: list[int] = []
        feeds: list[int] = []
        for request, start, count in zip(plan.requests, plan.starts, plan.counts, strict=True):
            known = request.tokens[start : start + count]
            tokens += known
            feed = -1
            if len(known) < count:
                missing = request.drafts[: count - len(known)]
                if not missing:
                    assert in_flight is not None
                    assert count == 1, "only the last token of a request can be in flight"
                    missing, feed = [0], in_flight[request.id]
                tokens += missing
            feeds.append(feed)
        self.tokens.host[: len(tokens)] = tokens
        if in_flight is None:
            return False
        self.feeds.host[: len(feeds)] = feeds
        return max(feeds) >= 0

    def _fill_blocks(self, plan: Plan, group: int, query_starts: list[int]) -> None:
        """Where each token's k and v go: its block's first slot and its place in the block."""
        size, slots = self.block_size, self.slots[group].host
        for row, request in enumerate(plan.requests):
            blocks = request.tables[group]
            self.tables[group].fill(row, blocks)
            first, start, count = query_starts[row], plan.starts[row], plan.counts[row]
            if count == 1:
                slots[first] = (blocks[start // size] or 0) * size + start % size
                continue
            places = self.positions.host[first : first + count]
            slots[first : first + count] = self.tables[group].buffer.host[row, places // size] * size + places % size
