"""GpuBuffers: a plan as tensors for captured steps, whose shapes and addresses never change.

What differs from step to step is in the numbers: which rows have one query, and which tiles the others are cut into.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.plan import Plan
from quire.engine.batch import Batch, BatchBuffers, BufferShape, Samples
from quire.engine.buffers import Buffer
from quire.kernels.cuda.attention import varlen_items
from quire.kernels.cuda.attention.dispatch import Work, cut_items, cut_tiles, split_rows
from quire.kernels.cuda.attention.prefill import TILE_QUERIES, Tiles
from quire.kernels.cuda.attention.split_kv import FIELDS, NOBODY, room_for_splits
from quire.kernels.cuda.launch.upload import Upload
from quire.kernels.paging import Ends, Paging

NUM_BUFFERS = 13  # of a step, beside a table and slots for each group of layers and splits for each window
SPARE_TILES = 64  # beside full ones: each row may have one that is not


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What attention looks like: query heads for each key head, key heads, and how rows are cut for programs."""

    group: int
    kv_heads: int
    last_window: int | None  # of the last layer
    uses_items: bool  # rows of several queries are computed by `varlen`
    exact: bool


class GpuBuffers(BatchBuffers):
    """Room for the largest step there can be, on the host and on the device."""

    def __init__(self, shape: BufferShape, heads: AttentionShape) -> None:
        max_tokens, max_rows, windows, device = shape.max_tokens, shape.max_rows, shape.windows, shape.device
        num_fixed = shape.num_fixed_groups + 1  # and the encoder's lengths
        delivery = Upload(NUM_BUFFERS + 2 * len(windows) + 2 * len(set(windows)) + num_fixed)
        super().__init__(shape, delivery)
        self.device = device
        self.max_tokens = max_tokens
        self.max_rows = max_rows
        self.heads = heads
        self.tiles = Buffer((1 + 2 * room_for_tiles(max_tokens),), torch.int32, device, delivery)
        most_splits = self._room_for_splits(max_rows)
        self.splits = {window: Buffer((most_splits, FIELDS), torch.int32, device, delivery) for window in windows}
        self.items = {
            window: Buffer((self._room_for_items(max_tokens),), torch.int32, device, delivery) for window in windows
        }  # fmt: skip
        self.sample_entries = Buffer((max_tokens,), torch.int32, device, delivery)
        self.sample_lengths = Buffer((max_tokens,), torch.int32, device, delivery)
        # Of steps with prompts: what the last layer computes, which are the samples and no other tokens.
        self.sample_indices = Buffer((max_tokens,), torch.int64, device, delivery)
        self.sample_rows = Buffer((max_tokens,), torch.int64, device, delivery)
        self.last_window = heads.last_window
        self.end_splits = Buffer((most_splits, FIELDS), torch.int32, device, delivery)
        self.starts = torch.arange(max_tokens + 1, dtype=torch.int32, device=device)

    def decode_batch(self, size: int) -> Batch:
        """The buffers of a step of so many single tokens, as a captured graph reads them."""
        return self._captured(size, size, Work(True, False, self._splits(size)))

    def mixed_batch(self, size: int, rows: int, *, has_singles: bool) -> Batch:
        """The buffers of any step of so many tokens and rows."""
        splits = self._splits(rows) if has_singles else {}
        items = {window: buffer.view(self._room_for_items(size)) for window, buffer in self.items.items()}
        tiles = Tiles(self.tiles.view(1 + 2 * room_for_tiles(size)))
        return self._captured(size, rows, Work(has_singles, True, splits, items, tiles))

    def ends_of(self, batch: Batch, rows: int) -> Ends:
        """The samples of such a step."""
        splits = {self.last_window: self.end_splits.view(self._room_for_splits(rows))}
        work, paging = Work(True, False, splits), batch.paging
        lengths = self.sample_lengths.view(rows)
        return Ends(
            self.sample_indices.view(rows),
            Paging(self.starts[: rows + 1], lengths, paging.block_tables, [], self.block_size, [], [], work=work),
        )

    def _captured(self, size: int, rows: int, work: Work) -> Batch:
        tables = [table.buffer.view(rows, self.max_blocks) for table in (*self.tables, *self.fixed_tables)]
        slots = [slots.view(size) for slots in self.slot_mapping]
        starts, seq_lens = self.query_starts.view(rows + 1), self.seq_lens.view(rows)
        encoder_lens = self.encoder_lens.view(rows) if self.encoder_lens else None
        paging = Paging(
            starts, seq_lens, tables, slots, self.block_size, [], [], work=work, encoder_lens=encoder_lens
        )  # fmt: skip
        return Batch(
            self.tokens.view(size), self.positions.view(size), paging, Samples(), self.last_token_entries.view(rows)
        )

    def _splits(self, rows: int) -> dict[int | None, Tensor]:
        return {window: buffer.view(self._room_for_splits(rows)) for window, buffer in self.splits.items()}

    def _room_for_splits(self, rows: int) -> int:
        return rows if self.heads.exact else room_for_splits(rows, self.heads.kv_heads)

    def _room_for_items(self, num_tokens: int) -> int:
        heads = self.heads
        room = varlen_items.room_for(num_tokens, self.max_rows, heads.group, heads.kv_heads)
        return 1 + varlen_items.ITEM_FIELDS * room

    def fill_decode(self, plan: Plan, size: int) -> Samples:
        """A step of single tokens, filled up to `size` of them."""
        samples = self._lay_out(plan, size, size).samples
        self._fill_splits(np.arange(len(plan)), size)
        self._send_samples(samples, size)
        self._has_sent()
        return samples

    def fill_mixed(self, plan: Plan, size: int, rows: int) -> Samples:
        """Any step, filled up to so many tokens, rows and samples; there is room for its tiles."""
        samples = self._lay_out(plan, size, rows).samples
        if self.heads.uses_items:
            self._fill_items(plan)
        else:
            tiles = cut_tiles(plan.counts)
            self.tiles.host[: 1 + 2 * len(tiles)] = Tiles.flatten(tiles)
            self.tiles.send(1 + 2 * len(tiles))
        self._fill_splits(np.flatnonzero(np.array(plan.counts) == 1), rows)
        self._send_samples(samples, rows)
        self.sample_indices.host[len(samples) : rows] = 0
        self.sample_indices.send(rows)
        its_rows, lengths = np.array(samples.rows, np.int64), np.array(samples.lengths, np.int64)
        self._fill_split(self.end_splits, its_rows, np.arange(len(samples)), lengths, self.last_window, rows)
        self._has_sent()
        return samples

    def fill_eager(self, plan: Plan) -> tuple[Batch, Ends]:
        """Any step as it is, and its samples; of a step without any, its first token."""
        batch = self._lay_out(plan)
        samples = batch.samples
        shown = samples if len(samples) else Samples([], [0], [0], [plan.starts[0] + 1], [0], [self.state.unused])
        count = len(shown)
        self._send_samples(shown, count)
        self.sample_rows.host[:count] = shown.rows
        tokens, rows = self.sample_indices.send(count), self.sample_rows.send(count)
        self._has_sent()
        tables = batch.paging.block_tables
        if shown.rows != list(range(len(plan))):
            tables = [table[rows] for table in tables]
        starts, lengths = self.starts[: count + 1], self.sample_lengths.view(count)
        paging = Paging(starts, lengths, tables, [], self.block_size, list(range(count + 1)), shown.lengths)
        return batch, Ends(tokens, paging)

    def _send_samples(self, samples: Samples, size: int) -> None:
        """The columns of a step's samples, filled up to so many."""
        count = len(samples)
        self.sample_entries.host[:count], self.sample_entries.host[count:size] = samples.entries, self.state.unused
        self.sample_lengths.host[:count], self.sample_lengths.host[count:size] = samples.lengths, 0
        self.sample_indices.host[:count] = samples.indices
        self.sample_entries.send(size)
        self.sample_lengths.send(size)

    def fill_nothing(self, size: int, rows: int) -> None:
        """A step that reads and writes nothing, to be run before there is any work."""
        self._sent_before()
        self.query_starts.host[:1] = 0
        self._pad(0, size, 0, rows)
        self.tiles.host[0] = 0
        self._send_samples(Samples(), rows)
        self.sample_indices.host[:rows] = 0
        self.sample_indices.send(rows)
        for buffer in (self.tokens, self.positions, *self.slot_mapping):
            buffer.send(size)
        self.query_starts.send(rows + 1)
        self.seq_lens.send(rows)
        self.last_token_entries.send(rows)
        self.tiles.send(1)
        for items in self.items.values():
            items.host[0] = 0
            items.send(1)
        for splits in (*self.splits.values(), self.end_splits):
            splits.host[:, 0] = NOBODY
            splits.send(len(splits.host))
        self._has_sent()

    def _fill_items(self, plan: Plan) -> None:
        group, kv_heads, seq_lens = self.heads.group, self.heads.kv_heads, self.seq_lens.host[: len(plan)]
        for window, buffer in self.items.items():
            items = cut_items(plan.counts, seq_lens, group, kv_heads, self.block_size, window)
            buffer.host[: len(items)] = items
            buffer.send(len(items))

    def _fill_splits(self, rows: NDArray[np.int64], most_rows: int) -> None:
        tokens, ends = self.query_starts.host[rows], self.seq_lens.host[rows].astype(np.int64)
        for window, buffer in self.splits.items():
            self._fill_split(buffer, rows, tokens, ends, window, most_rows)

    def _fill_split(
        self,
        buffer: Buffer,
        rows: NDArray[np.int64],
        tokens: NDArray[np.int64],
        ends: NDArray[np.int64],
        window: int | None,
        most_rows: int,
    ) -> None:
        splits = split_rows(rows, tokens, ends, window, self.heads.kv_heads, exact=self.heads.exact)
        room = self._room_for_splits(most_rows)
        buffer.host[: len(splits)] = splits
        buffer.host[len(splits) : room, 0] = NOBODY
        buffer.send(room)

    def has_room(self, plan: Plan, size: int) -> bool:
        """Whether what programs take of a plan fits into a captured step of that size."""
        return self.heads.uses_items or sum(
            -(-count // TILE_QUERIES) for count in plan.counts if count > 1
        ) <= room_for_tiles(size)


def room_for_tiles(num_tokens: int) -> int:
    return num_tokens // TILE_QUERIES + SPARE_TILES
