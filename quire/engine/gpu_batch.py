"""GpuBuffers: a plan as tensors of fixed shapes and addresses, for captured graphs.

Steps differ only in the data: which rows have one query, and which tiles the other rows are split into.
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
from quire.kernels.cuda.attention.dispatch import Work, cut_items, cut_tiles, list_tokens, num_units, split_rows
from quire.kernels.cuda.attention.prefill import TILE_QUERIES, Tiles
from quire.kernels.cuda.attention.split_kv import FIELDS, PADDING_ROW, max_splits
from quire.kernels.cuda.attention.verify import MAX_QUERIES, is_fastest
from quire.kernels.cuda.launch.upload import Upload
from quire.kernels.cuda.sampling import accept
from quire.kernels.paging import NO_TOKEN, Ends, Paging, tree_paths

NUM_BUFFERS = 19  # of a step, without those for each group (table, slots) and each window (splits, items)
SPARE_TILES = 64  # for partial tiles: each row may have one
MAX_VERIFIED = 1024  # tokens of a captured step with drafts


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The heads of a layer, and how rows are split into programs."""

    num_queries_per_kv: int  # query heads for each key head
    kv_heads: int
    last_window: int | None  # of the last layer
    uses_items: bool  # rows of several queries run on `varlen`
    exact: bool
    latents: bool = False  # MLA: one key head

    def num_units(self, max_queries: int, num_tokens: int) -> int:
        """Programs of a split."""
        group, kv_heads = self.num_queries_per_kv, self.kv_heads
        return num_units(max_queries, group, kv_heads, num_tokens, exact=self.exact, latents=self.latents)


class GpuBuffers(BatchBuffers):
    """Buffers for the largest step there can be, on the host and on the device."""

    def __init__(self, shape: BufferShape, attention: AttentionShape) -> None:
        max_tokens, max_rows, windows, arrays = shape.max_tokens, shape.max_rows, shape.windows, shape.arrays
        num_fixed = shape.num_fixed_groups + 1  # and encoder_lens
        uploader = Upload(NUM_BUFFERS + 2 * len(windows) + 2 * len(set(windows)) + num_fixed)
        super().__init__(shape, uploader)
        self.max_tokens = max_tokens
        self.max_rows = max_rows
        self.attention = attention
        self.tiles = Buffer((1 + 2 * max_tiles(max_tokens),), "int32", arrays, uploader)
        self.max_verified = min(max_tokens, MAX_VERIFIED)
        max_splits = max(self._max_splits(max_rows), self.max_verified if attention.exact else 0)
        self.splits = {window: Buffer((max_splits, FIELDS), "int32", arrays, uploader) for window in windows}
        self.items = {
            window: Buffer((self._max_items(max_tokens),), "int32", arrays, uploader) for window in windows
        }  # fmt: skip
        self.sample_entries = Buffer((max_tokens,), "int32", arrays, uploader)
        self.sample_lengths = Buffer((max_tokens,), "int32", arrays, uploader)
        # For steps with prompts: the last layer computes the samples only.
        self.sample_indices = Buffer((max_tokens,), "int64", arrays, uploader)
        self.sample_rows = Buffer((max_tokens,), "int64", arrays, uploader)
        self.last_window = attention.last_window
        self.end_splits = Buffer((max_splits, FIELDS), "int32", arrays, uploader)
        self.starts = torch.arange(max_tokens + 1, dtype=torch.int32, device=arrays.device)
        # For steps with drafts: the rows that have some, and each sample's parent (see `accept_drafts`). For captured
        # steps with trees each token's ancestors, as exact attention takes them or as the other kernels do.
        self.draft_rows = Buffer((max_rows, accept.FIELDS), "int32", arrays, uploader)
        self._chain_parents = np.arange(accept.MAX_NODES, dtype=np.int32)
        self.parents = Buffer((max_tokens + accept.MAX_NODES,), "int32", arrays, uploader)
        # With a drafter: the entries of rows whose drafts are on the device, and the token after each token of a step
        # with prompts, from index 1 on. Of rows that are sampled the device adds the last one.
        self.has_drafter = False
        self.draft_entries = Buffer((max_rows,), "int32", arrays, uploader)
        self.following = Buffer((1 + max_tokens,), "int64", arrays, uploader)
        self.following_entries = Buffer((max_rows,), "int32", arrays, uploader)
        shape_of_paths = (self.max_verified, MAX_QUERIES) if attention.exact else (self.max_verified,)
        self.ancestors = Buffer(shape_of_paths, "int32" if attention.exact else "int64", arrays, uploader)

    def decode_batch(self, size: int) -> Batch:
        """The buffers that the graph of a decode step of this size reads."""
        return self._captured(size, size, Work(True, False, self._splits(size)))

    def mixed_batch(self, size: int, rows: int, *, has_singles: bool) -> Batch:
        """The buffers that the graph of a step of this many tokens and rows reads."""
        splits = self._splits(rows) if has_singles else {}
        items = {window: buffer.view(self._max_items(size)) for window, buffer in self.items.items()}
        tiles = Tiles(self.tiles.view(1 + 2 * max_tiles(size)))
        return self._captured(size, rows, Work(has_singles, True, splits, items, tiles))

    def verify_batch(self, size: int, max_queries: int, *, has_trees: bool) -> Batch:
        """The buffers that the graph of a step of drafts reads: `size` tokens, at most `max_queries` a row."""
        rows, exact = min(size, self.max_rows), self.attention.exact
        if not has_trees and self._verifies_with_items(size, max_queries):
            items = {window: buffer.view(self._max_items(size)) for window, buffer in self.items.items()}
            return self._captured(size, rows, Work(False, True, items=items))
        splits = self._splits(size if exact else rows)
        work = Work(True, False, splits, max_queries=max_queries)
        if not has_trees:
            return self._captured(size, rows, work)
        ancestors = self.ancestors.view(size)
        work.masks = None if exact else ancestors
        return self._captured(size, rows, work, ancestors if exact else None)

    def ends_of(self, batch: Batch, rows: int) -> Ends:
        """The samples of a mixed batch."""
        splits = {self.last_window: self.end_splits.view(self._max_splits(rows))}
        work, paging = Work(True, False, splits), batch.paging
        lengths = self.sample_lengths.view(rows)
        return Ends(
            self.sample_indices.view(rows),
            Paging(self.starts[: rows + 1], lengths, paging.block_tables, [], self.block_size, [], [], work=work),
        )

    def _captured(self, size: int, rows: int, work: Work, paths: Tensor | None = None) -> Batch:
        tables = [table.buffer.view(rows, self.max_blocks) for table in (*self.tables, *self.fixed_tables)]
        slots = [slots.view(size) for slots in self.slot_mapping]
        starts, seq_lens = self.query_starts.view(rows + 1), self.seq_lens.view(rows)
        encoder_lens = self.encoder_lens.view(rows) if self.encoder_lens else None
        paging = Paging(
            starts, seq_lens, tables, slots, self.block_size, [], [], paths, work=work, encoder_lens=encoder_lens
        )  # fmt: skip
        return Batch(
            self.tokens.view(size), self.positions.view(size), paging, Samples(), self.last_token_entries.view(rows)
        )

    def _splits(self, rows: int) -> dict[int | None, Tensor]:
        return {window: buffer.view(self._max_splits(rows)) for window, buffer in self.splits.items()}

    def _max_splits(self, rows: int) -> int:
        return rows if self.attention.exact else max_splits(rows, self.attention.num_units(1, rows))

    def _max_items(self, num_tokens: int) -> int:
        attention = self.attention
        num_items = varlen_items.max_items(num_tokens, self.max_rows, attention.num_queries_per_kv, attention.kv_heads)
        return 1 + varlen_items.ITEM_FIELDS * num_items

    def _lay_out(self, plan: Plan, size: int | None = None, rows: int | None = None) -> Batch:
        batch = super()._lay_out(plan, size, rows)
        if self.has_drafter:
            entries, count = self.state.assign(plan), len(plan)
            self.draft_entries.host[: rows or count] = -1
            for row, drafts in plan.drafts.items():
                if drafts.on_device:
                    self.draft_entries.host[row] = entries[row]
            self.draft_entries.upload(rows or count)
            if plan.counts != plan.yields:
                self._fill_following(plan, entries, size or plan.num_tokens)
        return batch

    def _fill_following(self, plan: Plan, entries: list[int], size: int) -> None:
        following = self.following.host
        following[: 1 + size] = 0
        self.following_entries.host[: len(plan)] = -1
        for row, (request, start, count) in enumerate(zip(plan.requests, plan.starts, plan.counts, strict=True)):
            tokens, first = request.tokens[start + 1 : start + count + 1], int(self.query_starts.host[row]) + 1
            following[first : first + len(tokens)] = tokens
            if plan.yields[row] and row not in plan.drafts:
                self.following_entries.host[row] = entries[row]
        self.following.upload(1 + size)
        self.following_entries.upload(len(plan))

    def fill_decode(self, plan: Plan, size: int) -> Samples:
        """A decode step, padded to `size` rows."""
        samples = self._lay_out(plan, size, size).samples
        self._fill_splits(np.arange(len(plan)), 1, size)
        self._upload_samples(samples, size)
        self._upload_drafts(plan, samples, size)
        self.uploader.send()
        return samples

    def fill_verify(self, plan: Plan, size: int, max_queries: int, *, has_trees: bool) -> Samples:
        """A step whose tokens are all sampled, at most `max_queries` of a row, padded to `size` tokens."""
        rows = min(size, self.max_rows)
        samples = self._lay_out(plan, size, rows).samples
        if has_trees:
            self._fill_ancestors(plan)
        if self.attention.exact:
            self._fill_tokens_alone(plan, size)
        elif not has_trees and self._verifies_with_items(size, max_queries):
            self._fill_items(plan, 0)
        else:
            units = self.attention.num_units(max_queries, size)
            self._fill_splits(np.arange(len(plan)), np.array(plan.counts), rows, units)
        self._upload_samples(samples, size)
        self._upload_drafts(plan, samples, rows)
        self.uploader.send()
        return samples

    def _fill_ancestors(self, plan: Plan) -> None:
        """Of each token of the step; rows that are chains have none."""
        num_tokens = plan.num_tokens
        starts = self.query_starts.host[: len(plan) + 1].tolist()
        paths = tree_paths(
            starts, [plan.drafts[row].parents if row in plan.drafts else None for row in range(len(plan))]
        )
        if self.attention.exact:
            self.ancestors.host[:num_tokens, : paths.shape[1]] = paths
            self.ancestors.host[:num_tokens, paths.shape[1] :] = NO_TOKEN
        else:
            self.ancestors.host[:num_tokens] = to_masks(paths)
        self.ancestors.upload(num_tokens)

    def _fill_tokens_alone(self, plan: Plan, size: int) -> None:
        """For exact attention: each token as an entry of its own, whatever the window."""
        rows = np.arange(len(plan))
        splits = list_tokens(rows, self.query_starts.host[rows], np.array(plan.counts))
        for buffer in self.splits.values():
            buffer.host[: len(splits)] = splits
            buffer.host[len(splits) : size, 0] = PADDING_ROW
            buffer.upload(size)

    def _verifies_with_items(self, size: int, max_queries: int) -> bool:
        attention = self.attention
        return attention.uses_items and not is_fastest(max_queries, attention.num_queries_per_kv, size)

    def fill_mixed(self, plan: Plan, size: int, rows: int) -> Samples:
        """Any step whose tiles fit (`has_room`), padded to `size` tokens, `rows` rows and `rows` samples."""
        samples = self._lay_out(plan, size, rows).samples
        if self.attention.uses_items:
            self._fill_items(plan)
        else:
            tiles = cut_tiles(plan.counts)
            self.tiles.host[: 1 + 2 * len(tiles)] = Tiles.flatten(tiles)
            self.tiles.upload(1 + 2 * len(tiles))
        self._fill_splits(np.flatnonzero(np.array(plan.counts) == 1), 1, rows)
        self._upload_samples(samples, rows)
        self._upload_drafts(plan, samples, len(plan))
        self.sample_indices.host[len(samples) : rows] = 0
        self.sample_indices.upload(rows)
        its_rows, lengths = np.array(samples.rows, np.int64), np.array(samples.lengths, np.int64)
        self._fill_split(self.end_splits, its_rows, np.arange(len(samples)), 1, lengths, self.last_window, rows)
        self.uploader.send()
        return samples

    def fill_eager(self, plan: Plan) -> tuple[Batch, Ends]:
        """Any step without padding, and its samples. If it has none, its first token is taken as one."""
        batch = self._lay_out(plan)
        samples = batch.samples
        padding = Samples([], [0], [0], [plan.starts[0] + 1], [0], [self.state.padding_entry])
        padded_samples = samples if len(samples) else padding
        count = len(padded_samples)
        self._upload_samples(padded_samples, count)
        self._upload_drafts(plan, samples, len(plan))
        self.sample_rows.host[:count] = padded_samples.rows
        tokens, rows = self.sample_indices.upload(count), self.sample_rows.upload(count)
        self.uploader.send()
        tables = batch.paging.block_tables
        if padded_samples.rows != list(range(len(plan))):
            tables = [table[rows] for table in tables]
        starts, lengths = self.starts[: count + 1], self.sample_lengths.view(count)
        paging = Paging(starts, lengths, tables, [], self.block_size, list(range(count + 1)), padded_samples.lengths)
        return batch, Ends(tokens, paging)

    def _upload_samples(self, samples: Samples, size: int) -> None:
        """Upload the samples' columns, padded to `size`."""
        count = len(samples)
        self.sample_entries.host[:count] = samples.entries
        self.sample_entries.host[count:size] = self.state.padding_entry
        self.sample_lengths.host[:count], self.sample_lengths.host[count:size] = samples.lengths, 0
        self.sample_indices.host[:count] = samples.indices
        self.sample_entries.upload(size)
        self.sample_lengths.upload(size)

    def _upload_drafts(self, plan: Plan, samples: Samples, num_rows: int) -> None:
        """The rows that have drafts, and the parents of these. The root is 0, and node n is n + 1. They are padded to
        `num_rows` if the device drafts behind the step."""
        if not plan.drafts and not plan.drafted:
            return
        listed: list[tuple[int, ...]] = []
        lists_all, first, num_tokens = self._lists_all_rows(plan), 0, 0
        for row, num_yields in enumerate(plan.yields):
            drafts = plan.drafts.get(row)
            if num_yields and (drafts is not None or lists_all):
                num_drafts = 0 if drafts is None else len(drafts)
                capacity = plan.requests[row].capacity
                listed.append((row, first, samples.indices[first], num_drafts, capacity, num_tokens))
                num_tokens += 1 + num_drafts
                if drafts is not None:
                    parents = drafts.parents
                    self.parents.host[first + 1 : first + 1 + num_drafts] = (
                        self._chain_parents[:num_drafts] if parents is None else [parent + 1 for parent in parents]
                    )
            first += num_yields
        count = len(listed)
        self.draft_rows.host[:count] = listed
        if plan.drafted:
            self.draft_rows.host[count:num_rows] = PADDING_ROW
            count = num_rows
        self.draft_rows.upload(count)
        self.parents.upload(len(samples))

    def _lists_all_rows(self, plan: Plan) -> bool:
        return bool(plan.drafted) or (self.has_drafter and plan.counts == plan.yields)

    def listed_rows(self, plan: Plan) -> Tensor:
        """The rows of a step of drafts as `accept_drafts` takes them: those that have some, or all, if there is a
        drafter and no prompt."""
        rows: Tensor = self.draft_rows.view(len(plan) if self._lists_all_rows(plan) else len(plan.drafts))
        return rows

    def fill_padding(self, size: int, rows: int) -> None:
        """A step that consists of padding, for warmup and capture."""
        self.uploader.clear()
        self.query_starts.host[:1] = 0
        self._pad(0, size, 0, rows)
        self.tiles.host[0] = 0
        self._upload_samples(Samples(), rows)
        self.sample_indices.host[:rows] = 0
        self.sample_indices.upload(rows)
        for buffer in (self.tokens, self.positions, *self.slot_mapping):
            buffer.upload(size)
        self.query_starts.upload(rows + 1)
        self.seq_lens.upload(rows)
        self.last_token_entries.upload(rows)
        self.tiles.upload(1)
        for items in self.items.values():
            items.host[0] = 0
            items.upload(1)
        self.draft_rows.host[...] = PADDING_ROW
        self.draft_rows.upload(rows)
        self.draft_entries.host[...] = -1
        self.draft_entries.upload(rows)
        self.ancestors.host[...] = NO_TOKEN if self.attention.exact else 0
        self.ancestors.upload(len(self.ancestors.host))
        for splits in (*self.splits.values(), self.end_splits):
            splits.host[:, 0] = PADDING_ROW
            splits.upload(len(splits.host))
        self.uploader.send()

    def _fill_items(self, plan: Plan, max_few: int = 1) -> None:
        """Of the rows of more than `max_few` queries."""
        attention, seq_lens, group = self.attention, self.seq_lens.host[: len(plan)], self.attention.num_queries_per_kv
        for window, buffer in self.items.items():
            items = cut_items(plan.counts, seq_lens, group, attention.kv_heads, self.block_size, window, max_few)
            buffer.host[: len(items)] = items
            buffer.upload(len(items))

    def _fill_splits(
        self, rows: NDArray[np.int64], counts: NDArray[np.int64] | int, max_rows: int, units: int | None = None
    ) -> None:
        tokens, ends = self.query_starts.host[rows], self.seq_lens.host[rows].astype(np.int64)
        for window, buffer in self.splits.items():
            self._fill_split(buffer, rows, tokens, counts, ends, window, max_rows, units)

    def _fill_split(
        self,
        buffer: Buffer,
        rows: NDArray[np.int64],
        tokens: NDArray[np.int64],
        counts: NDArray[np.int64] | int,
        ends: NDArray[np.int64],
        window: int | None,
        max_rows: int,
        units: int | None = None,
    ) -> None:
        """`units`: programs of a split, those of one query unless given."""
        units = units or self.attention.num_units(1, max_rows)
        splits = split_rows(rows, tokens, counts, ends, window, units, exact=self.attention.exact)
        size = self._max_splits(max_rows)
        buffer.host[: len(splits)] = splits
        buffer.host[len(splits) : size, 0] = PADDING_ROW
        buffer.upload(size)

    def has_room(self, plan: Plan, size: int) -> bool:
        """Whether a plan's tiles fit into a captured step of that size."""
        return self.attention.uses_items or sum(
            -(-count // TILE_QUERIES) for count in plan.counts if count > 1
        ) <= max_tiles(size)


def max_tiles(num_tokens: int) -> int:
    return num_tokens // TILE_QUERIES + SPARE_TILES


def to_masks(paths: NDArray[np.int32]) -> NDArray[np.int64]:
    """`tree_paths` as bits, [tokens]: bit i is set if the row's token i is an ancestor of this token, or this token. A
    token of a chain has none."""
    bits = np.where(paths >= 0, np.int64(1) << np.maximum(paths, 0).astype(np.int64), np.int64(0))
    masks: NDArray[np.int64] = np.bitwise_or.reduce(bits, axis=1)
    return masks
