"""Batch: a plan as tensors. The buffers are made once and filled anew each step; the runner is their only user."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from operator import add

import numpy as np
import torch
from torch import Tensor

from quire.core.plan import Plan
from quire.core.request import Request
from quire.engine.buffers import Buffer, DirectUploader, TableBuffer, Uploader
from quire.engine.sampling_state import SamplingState
from quire.kernels.paging import Paging


@dataclass(slots=True)
class Samples:
    """The positions of a step at which a token is chosen: columns, in the order of the plan's rows.

    A row that ends with its request's last token has one of them, and one more for each draft behind that token.
    """

    requests: list[Request] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # of the plan
    indices: list[int] = field(default_factory=list)  # of the step's tokens
    lengths: list[int] = field(default_factory=list)  # tokens before the chosen one; its noise depends on this number
    nums_drafts: list[int] = field(default_factory=list)  # of these, how many are drafts
    entries: list[int] = field(default_factory=list)  # indices into the sampling state

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(slots=True)
class Batch:
    """What a model is called with for one step, and where its tokens are chosen."""

    tokens: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    paging: Paging
    samples: Samples
    last_token_entries: Tensor | None = None  # [rows] int32: the sampling state that has its first token; -1: known


@dataclass(frozen=True, slots=True)
class BufferShape:
    """The largest step there can be. `windows` has an entry for each group that grows with its request."""

    max_tokens: int
    max_rows: int
    max_len: int
    windows: tuple[int | None, ...]
    block_size: int
    vocab_size: int
    device: torch.device
    num_fixed_groups: int = 0  # an encoder's and states, whose block tables come after those of `windows`


class BatchBuffers:
    """Room for the largest step there can be."""

    def __init__(self, shape: BufferShape, uploader: Uploader | None = None) -> None:
        max_tokens, max_rows, block_size, device = shape.max_tokens, shape.max_rows, shape.block_size, shape.device
        self.uploader = uploader if uploader is not None else DirectUploader()
        max_blocks = -(-shape.max_len // block_size)
        self.block_size = block_size
        self.max_blocks = max_blocks
        self.state = SamplingState(max_rows, shape.vocab_size, device, self.uploader)
        self._sent = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.last_token_entries = Buffer((max_rows,), torch.int32, device, self.uploader)
        self.tokens = Buffer((max_tokens,), torch.int64, device, self.uploader)
        self.positions = Buffer((max_tokens,), torch.int64, device, self.uploader)
        self.query_starts = Buffer((max_rows + 1,), torch.int32, device, self.uploader)
        self.seq_lens = Buffer((max_rows,), torch.int32, device, self.uploader)
        self.tables = [TableBuffer(max_rows, max_blocks, device, self.uploader) for _ in shape.windows]
        self.slot_mapping = [Buffer((max_tokens,), torch.int64, device, self.uploader) for _ in shape.windows]
        self.fixed_tables = [
            TableBuffer(max_rows, max_blocks, device, self.uploader) for _ in range(shape.num_fixed_groups)
        ]
        self.encoder_lens = Buffer((max_rows,), torch.int32, device, self.uploader) if shape.num_fixed_groups else None

    def fill(self, plan: Plan) -> Batch:
        """Lay a plan out and send it. What an earlier step left behind the parts in use is never looked at."""
        batch = self._lay_out(plan)
        self._has_sent()
        return batch

    def _lay_out(self, plan: Plan, size: int | None = None, rows: int | None = None) -> Batch:
        """With a `size`, tokens that are stored nowhere fill the step up to so many; with `rows`, as many rows are
        shown, the last of which have no context."""
        self._sent_before()
        num_rows, num_tokens = len(plan), plan.num_tokens
        query_starts = list(accumulate(plan.counts, initial=0))
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
            self.tokens.send(num_tokens),
            self.positions.send(num_tokens),
            Paging(
                self.query_starts.send(num_rows + 1),
                self.seq_lens.send(num_rows),
                [
                    *(table.send(num_rows, max_blocks) for table in self.tables),
                    *(table.send(num_rows, self.max_blocks) for table in self.fixed_tables),
                ],
                [slots.send(num_tokens) for slots in self.slot_mapping],
                self.block_size,
                query_starts,
                seq_lens,
                encoder_lens=self.encoder_lens.send(num_rows) if self.encoder_lens else None,
            ),
            find_samples(plan, query_starts, seq_lens, entries),
            self.last_token_entries.send(num_rows) if has_unknown else None,
        )

    def _has_sent(self) -> None:
        self.uploader.send()
        if self._sent is not None:
            self._sent.record()

    def _sent_before(self) -> None:
        """What the last step was given must have left the host before it is overwritten."""
        if self._sent is not None:
            self._sent.synchronize()
        self.uploader.clear()

    def _pad(self, num_tokens: int, size: int, num_rows: int, rows: int) -> None:
        for buffer, value in ((self.tokens, 0), (self.positions, 0), *((slots, -1) for slots in self.slot_mapping)):
            buffer.host[num_tokens:size] = value
        self.seq_lens.host[num_rows:rows] = 0
        if self.encoder_lens:
            self.encoder_lens.host[num_rows:rows] = 0
        self.last_token_entries.host[num_rows:rows] = -1
        self.query_starts.host[num_rows + 1 : rows + 1] = self.query_starts.host[num_rows]

    def _fill_positions(self, plan: Plan, query_starts: list[int]) -> None:
        if plan.num_tokens == len(plan):
            self.positions.host[: len(plan)] = plan.starts
            return
        for first, start, count in zip(query_starts, plan.starts, plan.counts, strict=False):
            self.positions.host[first : first + count] = np.arange(start, start + count)

    def _fill_tokens(self, plan: Plan, entries: list[int]) -> bool:
        """Returns whether some are still on the device: those of a step that the host has not read yet."""
        tokens: list[int] = []
        unknown: list[int] = []
        for request, start, count, entry in zip(plan.requests, plan.starts, plan.counts, entries, strict=True):
            known = request.tokens[start : start + count]
            tokens += known
            its_entry = -1
            if len(known) < count:
                missing = request.drafts[: count - len(known)]
                if not missing:
                    assert count == 1, "only the last token of a request can be in flight"
                    missing, its_entry = [0], entry
                tokens += missing
            unknown.append(its_entry)
        self.tokens.host[: len(tokens)] = tokens
        self.last_token_entries.host[: len(unknown)] = unknown
        return max(unknown) >= 0

    def _fill_fixed(self, plan: Plan) -> None:
        """Blocks of the encoder and of states. They stay the same as long as a request runs."""
        if self.encoder_lens is None:
            return
        self.encoder_lens.host[: len(plan)] = [len(request.encoder_tokens) for request in plan.requests]
        for row, request in enumerate(plan.requests):
            for table, blocks in zip(self.fixed_tables, request.fixed_tables, strict=True):
                table.fill(row, blocks)

    def _fill_blocks(self, plan: Plan, group: int, query_starts: list[int]) -> None:
        """Where each token's k and v go: its block's first slot and its place in the block."""
        size, slots = self.block_size, self.slot_mapping[group].host
        for row, request in enumerate(plan.requests):
            blocks = request.tables[group]
            self.tables[group].fill(row, blocks)
            first, start, count = query_starts[row], plan.starts[row], plan.counts[row]
            if count == 1:
                slots[first] = (blocks[start // size] or 0) * size + start % size
                continue
            places = self.positions.host[first : first + count]
            slots[first : first + count] = self.tables[group].buffer.host[row, places // size] * size + places % size


def find_samples(plan: Plan, query_starts: list[int], seq_lens: list[int], entries: list[int]) -> Samples:
    """Where tokens are chosen: at the last positions of each row, as many as it yields."""
    if plan.num_tokens == len(plan) and all(plan.yields):
        count = len(plan)
        return Samples(plan.requests, list(range(count)), list(range(count)), seq_lens, [0] * count, entries)
    samples = Samples()
    for row, (request, num_yields) in enumerate(zip(plan.requests, plan.yields, strict=True)):
        for nth in range(num_yields):
            samples.requests.append(request)
            samples.rows.append(row)
            samples.indices.append(query_starts[row + 1] - num_yields + nth)
            samples.lengths.append(seq_lens[row] - num_yields + nth + 1)
            samples.nums_drafts.append(nth)
            samples.entries.append(entries[row])
    return samples
