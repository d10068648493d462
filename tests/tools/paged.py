"""PagedCache: block tables and caches for rows of any lengths, laid out to catch a kernel that reads what it must not.

Blocks are handed out in shuffled order, every slot that holds no visible token is NaN, and so is block 0, which the
entries behind a window point to.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

import torch

from quire.kernels.paging import LayerCache, Paging


class PagedCache:
    """Caches of `len(groups)` layers, each in a group; `windows` has an entry a group. Sequences are numbers."""

    def __init__(
        self,
        *,
        kv_heads: int,
        head_dim: int,
        groups: Sequence[int] = (0,),
        windows: Sequence[int | None] = (None,),
        num_blocks: int = 64,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        shape = (num_blocks, block_size, kv_heads, head_dim)
        self.layers = [LayerCache(poison(shape, dtype), poison(shape, dtype), group, block_size) for group in groups]
        self.windows = windows
        self.block_size = block_size
        self.lengths: dict[int, int] = {}
        self.tables: list[dict[int, list[int]]] = [{} for _ in windows]
        self.free = [list(range(1, num_blocks)) for _ in windows]
        for blocks in self.free:
            random.Random(seed).shuffle(blocks)

    def step(self, rows: Sequence[tuple[int, int]], paths: torch.Tensor | None = None) -> Paging:
        """The Paging of a step where each (sequence, count) goes on by `count` tokens."""
        starts = [0, *accumulate(count for _, count in rows)]
        slots = [[self._grow(group, *row) for row in rows] for group in range(len(self.windows))]
        for sequence, count in rows:
            self.lengths[sequence] = self.lengths.get(sequence, 0) + count
        lengths = [self.lengths[sequence] for sequence, _ in rows]
        return Paging(
            query_starts=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_tables=[self._table(group, rows) for group in range(len(self.windows))],
            slot_mapping=[torch.tensor([slot for row in group for slot in row], dtype=torch.int64) for group in slots],
            block_size=self.block_size,
            host_query_starts=starts,
            host_seq_lens=lengths,
            paths=paths,
        )

    def positions(self, rows: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Positions of the tokens of the step that was made last, [tokens] int64."""
        ends = [(self.lengths[sequence], count) for sequence, count in rows]
        return torch.tensor([position for end, count in ends for position in range(end - count, end)])

    def _grow(self, group: int, sequence: int, count: int) -> list[int]:
        length, size = self.lengths.get(sequence, 0), self.block_size
        table = self.tables[group].setdefault(sequence, [])
        while len(table) * size < length + count:
            table.append(self.free[group].pop())
        if (window := self.windows[group]) is not None:
            for index in range(max(0, length - window + 1) // size):
                self._drop(group, table, index)
        return [table[p // size] * size + p % size for p in range(length, length + count)]

    def _drop(self, group: int, table: list[int], index: int) -> None:
        for layer in self.layers:
            if layer.group == group:
                layer.k[table[index]] = layer.v[table[index]] = float("nan")
        table[index] = 0

    def _table(self, group: int, rows: Sequence[tuple[int, int]]) -> torch.Tensor:
        tables = [self.tables[group][sequence] for sequence, _ in rows]
        widest = max(map(len, tables))
        return torch.tensor([table + [0] * (widest - len(table)) for table in tables], dtype=torch.int32)


def poison(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(tuple(shape), float("nan"), dtype=dtype)
