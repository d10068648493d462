"""Batch: a plan as tensors. The buffers are made once and filled anew each step; the runner is their only user."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.core.plan import Plan
from quire.kernels.paging import Paging


@dataclass(slots=True)
class Batch:
    """What a model is called with for one step."""

    tokens: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    paging: Paging


class Buffer:
    """A tensor on the device and a numpy array on the host; on the CPU they are the same memory."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._on_host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self._on_device = self._on_host if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        self.host = self._on_host.numpy()

    def send(self, *sizes: int) -> Tensor:
        """The leading part of the buffer, on the device."""
        part = tuple(slice(size) for size in sizes)
        target = self._on_device[part]
        if self._on_device is not self._on_host:
            target.copy_(self._on_host[part], non_blocking=True)
        return target


class BatchBuffers:
    """Room for the largest step there can be."""

    def __init__(
        self, max_tokens: int, max_rows: int, max_len: int, num_groups: int, block_size: int, device: torch.device
    ) -> None:
        max_blocks = -(-max_len // block_size)
        self.block_size = block_size
        self.tokens = Buffer((max_tokens,), torch.int64, device)
        self.positions = Buffer((max_tokens,), torch.int64, device)
        self.query_starts = Buffer((max_rows + 1,), torch.int32, device)
        self.seq_lens = Buffer((max_rows,), torch.int32, device)
        self.tables = [Buffer((max_rows, max_blocks), torch.int32, device) for _ in range(num_groups)]
        self.slots = [Buffer((max_tokens,), torch.int64, device) for _ in range(num_groups)]

    def fill(self, plan: Plan) -> Batch:
        """Lay a plan out. What an earlier step left behind the parts in use is never looked at."""
        num_rows, num_tokens = len(plan), plan.num_tokens
        starts = np.array(plan.starts)
        counts = np.array(plan.counts)
        query_starts = self.query_starts.host[: num_rows + 1]
        np.cumsum(counts, out=query_starts[1:])
        seq_lens = self.seq_lens.host[:num_rows]
        np.add(starts, counts, out=seq_lens, casting="unsafe")
        row_of_token = np.repeat(np.arange(num_rows), counts)
        positions = self.positions.host[:num_tokens]
        positions[:] = np.arange(num_tokens) - (query_starts[:-1] - starts)[row_of_token]
        self._fill_tokens(plan)
        max_blocks = -(-int(seq_lens.max()) // self.block_size)
        for group in range(len(self.tables)):
            self._fill_blocks(plan, group, row_of_token, positions)
        paging = Paging(
            self.query_starts.send(num_rows + 1),
            self.seq_lens.send(num_rows),
            [table.send(num_rows, max_blocks) for table in self.tables],
            [slots.send(num_tokens) for slots in self.slots],
            self.block_size,
            query_starts.tolist(),
            seq_lens.tolist(),
        )
        return Batch(self.tokens.send(num_tokens), self.positions.send(num_tokens), paging)

    def _fill_tokens(self, plan: Plan) -> None:
        tokens, done = self.tokens.host, 0
        for request, start, count in zip(plan.requests, plan.starts, plan.counts, strict=True):
            known = request.tokens[start : start + count]
            if len(known) < count:
                known += request.drafts[: count - len(known)]
            tokens[done : done + count] = known
            done += count

    def _fill_blocks(
        self, plan: Plan, group: int, row_of_token: np.ndarray[tuple[int], np.dtype[np.int64]], positions: np.ndarray
    ) -> None:
        table = self.tables[group].host
        for row, request in enumerate(plan.requests):
            blocks = request.tables[group]
            table[row, : len(blocks)] = [block or 0 for block in blocks]
        slots = self.slots[group].host[: len(positions)]
        slots[:] = table[row_of_token, positions // self.block_size]
        slots *= self.block_size
        slots += positions % self.block_size
