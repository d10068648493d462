"""GpuBuffers: a plan as tensors for captured steps, whose shapes and addresses never change.

What differs from step to step is in the numbers: which rows have one query, and which tiles the others are cut into.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.params import SamplingParams
from quire.core.plan import Plan
from quire.core.request import Request
from quire.engine.batch import Batch, BatchBuffers, Buffer, BufferShape
from quire.engine.logits import send
from quire.engine.sampler import settings_of, signed
from quire.kernels.cuda import varlen_items
from quire.kernels.cuda.attention import Work, cut_items, cut_tiles, split_rows
from quire.kernels.cuda.deliver import Delivery
from quire.kernels.cuda.parts import FIELDS, NOBODY, room_for_splits
from quire.kernels.cuda.prefill import TILE_QUERIES, Tiles
from quire.kernels.cuda.sample import Draws
from quire.kernels.paging import Ends, Paging

NUM_BUFFERS = 10  # of a step, beside a table and slots for each group of layers and splits for each window
SPARE_TILES = 64  # beside full ones: each row may have one that is not


@dataclass(frozen=True, slots=True)
class Heads:
    """What attention looks like: query heads for each key head, key heads, and how rows are cut for programs."""

    group: int
    kv_heads: int
    last_window: int | None  # of the last layer
    uses_items: bool  # rows of several queries are computed by `varlen`
    exact: bool


class GpuBuffers(BatchBuffers):
    """Room for the largest step there can be, on the host and on the device."""

    def __init__(self, shape: BufferShape, heads: Heads) -> None:
        max_tokens, max_rows, windows, device = shape.max_tokens, shape.max_rows, shape.windows, shape.device
        delivery = Delivery(NUM_BUFFERS + 2 * len(windows) + 2 * len(set(windows)))
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
        # Of steps with prompts: where each row's last token is seen by the last layer, which computes no others.
        self.last_window = heads.last_window
        self.end_splits = Buffer((most_splits, FIELDS), torch.int32, device, delivery)
        self.row_starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self.seeds = Buffer((max_rows,), torch.int64, device, delivery)
        self.settings = Buffer((max_rows, len(settings_of(SamplingParams()))), torch.float64, device, delivery)
        self._drawn: list[Request] = []  # whose seeds and settings the device has

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
        """The last tokens of the rows of such a step."""
        paging = batch.paging
        tokens = (paging.query_starts[1:] - 1).clamp_(min=0).long()
        splits = {self.last_window: self.end_splits.view(self._room_for_splits(rows))}
        starts, work = self.row_starts[: rows + 1], Work(True, False, splits)
        return Ends(
            tokens, Paging(starts, paging.seq_lens, paging.block_tables, [], self.block_size, [], [], work=work)
        )  # fmt: skip

    def _captured(self, size: int, rows: int, work: Work) -> Batch:
        tables = [table.buffer.view(rows, self.max_blocks) for table in self.tables]
        slots = [slots.view(size) for slots in self.slots]
        starts, seq_lens = self.query_starts.view(rows + 1), self.seq_lens.view(rows)
        paging = Paging(starts, seq_lens, tables, slots, self.block_size, [], [], work=work)
        return Batch(self.tokens.view(size), self.positions.view(size), paging, self.feeds.view(rows))

    def _splits(self, rows: int) -> dict[int | None, Tensor]:
        return {window: buffer.view(self._room_for_splits(rows)) for window, buffer in self.splits.items()}

    def _room_for_splits(self, rows: int) -> int:
        return rows if self.heads.exact else room_for_splits(rows, self.heads.kv_heads)

    def _room_for_items(self, num_tokens: int) -> int:
        heads = self.heads
        room = varlen_items.room_for(num_tokens, self.max_rows, heads.group, heads.kv_heads)
        return 1 + varlen_items.ITEM_FIELDS * room

    def fill_decode(self, plan: Plan, in_flight: Mapping[str, int], size: int) -> None:
        """A step of single tokens, filled up to `size` of them."""
        self._lay_out(plan, in_flight, size, size)
        self._fill_splits(np.arange(len(plan)), size)
        self._has_sent()

    def fill_mixed(self, plan: Plan, in_flight: Mapping[str, int], size: int, rows: int) -> None:
        """Any step, filled up to so many tokens and rows, whose tiles there is room for."""
        self._lay_out(plan, in_flight, size, rows)
        if self.heads.uses_items:
            self._fill_items(plan)
        else:
            tiles = cut_tiles(plan.counts)
            self.tiles.host[: 1 + 2 * len(tiles)] = Tiles.flatten(tiles)
            self.tiles.send(1 + 2 * len(tiles))
        self._fill_splits(np.flatnonzero(np.array(plan.counts) == 1), rows)
        ends = np.arange(len(plan))
        self._fill_split(self.end_splits, ends, ends, self.last_window, rows)
        self._has_sent()

    def fill_nothing(self, size: int, rows: int) -> None:
        """A step that reads and writes nothing, to be run before there is any work."""
        self._sent_before()
        self.query_starts.host[:1] = 0
        self._pad(0, size, 0, rows)
        self.tiles.host[0] = 0
        for buffer in (self.tokens, self.positions, *self.slots):
            buffer.send(size)
        self.query_starts.send(rows + 1)
        self.seq_lens.send(rows)
        self.feeds.send(rows)
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
        tokens = self.query_starts.host[rows]
        for window, buffer in self.splits.items():
            self._fill_split(buffer, rows, tokens, window, most_rows)

    def _fill_split(
        self, buffer: Buffer, rows: NDArray[np.int64], tokens: NDArray[np.int64], window: int | None, most_rows: int
    ) -> None:
        ends = self.seq_lens.host[rows].astype(np.int64)
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

    def fill_draws(self, plan: Plan) -> Draws | None:
        """What the plan's rows want drawn, which the device mostly has already; None if all take the likeliest token.

        Called when the plan has been laid out and nothing else launched, so that the next step need not wait long.
        """
        if not is_drawn(plan):
            return None
        num_rows = len(plan)
        if self._drawn != plan.requests:
            self.seeds.host[:num_rows] = [signed(request.seed) for request in plan.requests]
            self.settings.host[:num_rows] = [settings_of(request.params) for request in plan.requests]
            self.seeds.send(num_rows)
            self.settings.send(num_rows)
            self._has_sent()
            self._drawn = list(plan.requests)
        return describe_draws(plan.requests, self.seeds.view(num_rows), self.settings.view(num_rows))

    def send_draws(self, requests: Sequence[Request]) -> Draws:
        """What some of a plan's rows want drawn, beside all of them."""
        seeds = send([signed(request.seed) for request in requests], np.int64, self.device)
        settings = send([settings_of(request.params) for request in requests], np.float64, self.device)
        return describe_draws(requests, seeds, settings)


def is_drawn(plan: Plan) -> bool:
    """Whether any row draws. What rows want whose logits are changed does not matter: they are chosen once more."""
    return not all(request.params.greedy or request.changes_logits for request in plan.requests)


def describe_draws(requests: Sequence[Request], seeds: Tensor, settings: Tensor) -> Draws:
    params = [request.params for request in requests]
    has_top_p = any(each.top_p < 1.0 for each in params)
    return Draws(seeds, settings, has_top_k=any(each.top_k for each in params), has_top_p=has_top_p)


def room_for_tiles(num_tokens: int) -> int:
    return num_tokens // TILE_QUERIES + SPARE_TILES
