"""Batch: a plan as arrays. The buffers are reused by every step; the runner is their only user."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from operator import add

import numpy as np
from numpy.typing import NDArray

from quire.core.drafts import ROOT, Drafts
from quire.core.plan import Plan
from quire.core.request import Request
from quire.engine.buffers import Buffer, DirectUploader, TableBuffer, Uploader
from quire.engine.sampling_state import SamplingState
from quire.kernels.arrays import Array, Arrays
from quire.kernels.paging import Paging, tree_paths


@dataclass(slots=True)
class Samples:
    """The positions of a step at which a token is sampled: columns, in the order of the plan's rows.

    A row that ends with its request's last token has one sample, and one more after each draft.
    """

    requests: list[Request] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # of the plan
    indices: list[int] = field(default_factory=list)  # into the step's tokens
    lengths: list[int] = field(default_factory=list)  # tokens before the sampled one; the random noise depends on it
    nodes: list[int] = field(default_factory=list)  # the draft before it: a node of its row's drafts, or ROOT
    entries: list[int] = field(default_factory=list)  # indices into the sampling state
    drafts: dict[int, Drafts] = field(default_factory=dict)  # by row, if it has any

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(slots=True)
class Batch:
    """The model's input for one step, and its samples."""

    tokens: Array  # [tokens] int64
    positions: Array  # [tokens] int64
    paging: Paging
    samples: Samples
    last_token_entries: Array | None = None  # [rows] int32: entry of the row's first token; -1: on the host


@dataclass(frozen=True, slots=True)
class BufferShape:
    """The largest step there can be. `windows` has one for each self-attention group."""

    max_tokens: int
    max_rows: int
    max_len: int
    windows: tuple[int | None, ...]
    block_size: int
    vocab_size: int
    arrays: Arrays
    num_fixed_groups: int = 0  # cross-attention and state groups; their block tables come after those of `windows`


class BatchBuffers:
    """Buffers for the largest step there can be."""

    def __init__(self, shape: BufferShape, uploader: Uploader | None = None) -> None:
        max_tokens, max_rows, block_size, arrays = shape.max_tokens, shape.max_rows, shape.block_size, shape.arrays
        self.uploader = uploader if uploader is not None else DirectUploader(arrays)
        max_blocks = -(-shape.max_len // block_size)
        self._arrays = arrays
        self.block_size = block_size
        self.max_blocks = max_blocks
        self.state = SamplingState(max_rows, shape.vocab_size, arrays, self.uploader)
        self.last_token_entries = Buffer((max_rows,), "int32", arrays, self.uploader)
        self.tokens = Buffer((max_tokens,), "int64", arrays, self.uploader)
        self.positions = Buffer((max_tokens,), "int64", arrays, self.uploader)
        self.query_starts = Buffer((max_rows + 1,), "int32", arrays, self.uploader)
        self.seq_lens = Buffer((max_rows,), "int32", arrays, self.uploader)
        self.tables = [TableBuffer(max_rows, max_blocks, arrays, self.uploader) for _ in shape.windows]
        self.slot_mapping = [Buffer((max_tokens,), "int64", arrays, self.uploader) for _ in shape.windows]
        self.fixed_tables = [
            TableBuffer(max_rows, max_blocks, arrays, self.uploader) for _ in range(shape.num_fixed_groups)
        ]
        self.encoder_lens = Buffer((max_rows,), "int32", arrays, self.uploader) if shape.num_fixed_groups else None

    def reset(self) -> None:
        """Forget what is on the device: plans were dropped."""
        self.state.clear()
        for table in [*self.tables, *self.fixed_tables]:
            table.reset()

    def fill(self, plan: Plan) -> Batch:
        """Fill and upload the buffers. Rows beyond the plan's keep old data, which is never read."""
        batch = self._lay_out(plan)
        self.uploader.send()
        return batch

    def _lay_out(self, plan: Plan, size: int | None = None, rows: int | None = None) -> Batch:
        """`size` and `rows` pad the step to that many tokens and rows. Padding tokens have no slot, and padding rows no
        context. Captured steps are padded, and have buffers of their own for the paths of trees."""
        self.uploader.clear()
        query_starts = list(accumulate(plan.counts, initial=0))
        num_rows, num_tokens = len(plan.counts), query_starts[-1]
        seq_lens = list(map(add, plan.starts, plan.counts))
        self.query_starts.host[: num_rows + 1] = query_starts
        self.seq_lens.host[:num_rows] = seq_lens
        self._fill_positions(plan, query_starts)
        entries = self.state.assign(plan)
        has_unknown = self._fill_tokens(plan, entries)
        for group in range(len(self.tables)):
            self._fill_blocks(plan, group, query_starts)
        self._fill_fixed(plan)
        max_blocks = -(-max(seq_lens) // self.block_size)
        if size is not None and rows is not None:
            self._pad(num_tokens, size, num_rows, rows)
            num_rows, num_tokens, max_blocks, has_unknown = rows, size, self.max_blocks, True
        return Batch(
            self.tokens.upload(num_tokens),
            self.positions.upload(num_tokens),
            Paging(
                self.query_starts.upload(num_rows + 1),
                self.seq_lens.upload(num_rows),
                [
                    *(table.upload(num_rows, max_blocks) for table in self.tables),
                    *(table.upload(num_rows, self.max_blocks) for table in self.fixed_tables),
                ],
                [slots.upload(num_tokens) for slots in self.slot_mapping],
                self.block_size,
                query_starts,
                seq_lens,
                paths=self._find_paths(plan, query_starts) if size is None else None,
                encoder_lens=self.encoder_lens.upload(num_rows) if self.encoder_lens else None,
            ),
            find_samples(plan, query_starts, seq_lens, entries),
            self.last_token_entries.upload(num_rows) if has_unknown else None,
        )

    def _find_paths(self, plan: Plan, query_starts: list[int]) -> Array | None:
        """The paths of draft trees. None if all drafts are chains."""
        if all(drafts.is_chain for drafts in plan.drafts.values()):
            return None
        parents = [plan.drafts[row].parents if row in plan.drafts else None for row in range(len(plan))]
        return self._arrays.put(tree_paths(query_starts, parents), "int32")

    def _pad(self, num_tokens: int, size: int, num_rows: int, rows: int) -> None:
        for buffer, value in ((self.tokens, 0), (self.positions, 0), *((slots, -1) for slots in self.slot_mapping)):
            buffer.host[num_tokens:size] = value
        self.seq_lens.host[num_rows:rows] = 0
        if self.encoder_lens:
            self.encoder_lens.host[num_rows:rows] = 0
        self.last_token_entries.host[num_rows:rows] = -1
        self.query_starts.host[num_rows + 1 : rows + 1] = self.query_starts.host[num_rows]

    def _fill_positions(self, plan: Plan, query_starts: list[int]) -> None:
        num_rows = len(plan.starts)
        if query_starts[-1] == num_rows:
            self.positions.host[:num_rows] = plan.starts
            return
        self.positions.host[: query_starts[-1]] = chain_positions(plan, query_starts)[1]
        for row, drafts in plan.drafts.items():
            if not drafts.is_chain:
                first = query_starts[row] + 1
                self.positions.host[first : first + len(drafts)] = plan.starts[row] + np.array(drafts.depths())

    def _fill_tokens(self, plan: Plan, entries: list[int]) -> bool:
        """Returns whether some tokens are only on the device: the host has not read the step that sampled them."""
        tokens: list[int] = []
        unknown: list[int] = []
        rows = zip(plan.requests, plan.starts, plan.counts, entries, strict=True)
        for row, (request, start, count, entry) in enumerate(rows):
            known = request.tokens[start : start + count]
            tokens += known
            its_entry = -1
            if len(known) < count:
                missing = plan.drafts[row].tokens if row in plan.drafts else []
                if not missing:
                    assert count == 1, "only the last token of a request can be in flight"
                    missing, its_entry = [0], entry
                tokens += missing
            unknown.append(its_entry)
        self.tokens.host[: len(tokens)] = tokens
        self.last_token_entries.host[: len(unknown)] = unknown
        return max(unknown) >= 0

    def _fill_fixed(self, plan: Plan) -> None:
        """Blocks of cross-attention and state groups. They do not change while a request runs."""
        if self.encoder_lens is None:
            return
        self.encoder_lens.host[: len(plan)] = [len(request.encoder_tokens) for request in plan.requests]
        for row, request in enumerate(plan.requests):
            for table, blocks in zip(self.fixed_tables, request.fixed_tables, strict=True):
                table.fill(row, blocks)

    def _fill_blocks(self, plan: Plan, group: int, query_starts: list[int]) -> None:
        """Block tables and slots. A token's slot is block * block_size + offset."""
        size, slots, table = self.block_size, self.slot_mapping[group].host, self.tables[group]
        for row, request in enumerate(plan.requests):
            table.fill(row, request.tables[group])
        if query_starts[-1] == len(plan.starts):
            for row, (request, start) in enumerate(zip(plan.requests, plan.starts, strict=True)):
                slots[row] = (request.tables[group][start // size] or 0) * size + start % size
            return
        rows, positions = chain_positions(plan, query_starts)  # a tree's nodes lie one after another too
        slots[: len(rows)] = table.buffer.host[rows, positions // size] * size + positions % size


def chain_positions(plan: Plan, query_starts: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The row and the position of each token, as if no row were a tree."""
    counts = np.array(plan.counts, np.int64)
    rows = np.repeat(np.arange(len(counts)), counts)
    first = np.repeat(np.array(plan.starts, np.int64) - query_starts[:-1], counts)
    return rows, first + np.arange(len(rows))


def find_samples(plan: Plan, query_starts: list[int], seq_lens: list[int], entries: list[int]) -> Samples:
    """The last `yields` positions of each row."""
    count = len(plan.yields)
    if query_starts[-1] == count and all(plan.yields):
        return Samples(plan.requests, list(range(count)), list(range(count)), seq_lens, [ROOT] * count, entries)
    samples = Samples(drafts=plan.drafts)
    for row, (request, num_yields) in enumerate(zip(plan.requests, plan.yields, strict=True)):
        depths = [0, *plan.drafts[row].depths()] if row in plan.drafts else [0]
        first, last = query_starts[row + 1] - num_yields, seq_lens[row] - num_yields + 1
        samples.requests += [request] * num_yields
        samples.rows += [row] * num_yields
        samples.indices += range(first, first + num_yields)
        samples.lengths += [last + depth for depth in depths[:num_yields]]
        samples.nodes += range(ROOT, ROOT + num_yields)
        samples.entries += [entries[row]] * num_yields
    return samples
