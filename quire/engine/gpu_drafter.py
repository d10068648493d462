"""GpuDrafter: an EAGLE head that drafts on the GPU behind a step, before the host knows the step's tokens.

The head's keys and values are one more layer in the target's blocks. The target's states after the tapped layers are
kept on the device for one step. Behind a step the head computes that step's tokens, with the tokens sampled after them,
and then one more token a row in each pass. The drafts stay on the device: the next step takes them as its input. The
GPU's runner calls it.

Of every other token the head needs keys and values only. Those of prompts are stored behind the step that computes
them. Steps behind which nothing is drafted keep their tokens' states, and those are computed together: before the next
drafts, and before anything else could use the tokens' slots. So no key is ever missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from quire.core.plan import Plan
from quire.core.request import Request
from quire.engine.batch import Batch
from quire.engine.gpu_batch import GpuBuffers
from quire.kernels import Kernels
from quire.kernels.cuda.attention import split_kv
from quire.kernels.cuda.attention.dispatch import Work
from quire.kernels.cuda.drafting import Kept, Places, fill_drafts, keep_states, place_drafts
from quire.kernels.cuda.sampling.accept import FIELDS
from quire.kernels.cuda.sampling.argmax import Argmax
from quire.kernels.paging import Ends, LayerCache, Paging
from quire.kernels.taps import Taps
from quire.layers.embedding import Head
from quire.models.decoder import Decoder
from quire.models.eagle import Eagle
from quire.quant.dense import Dense
from quire.quant.weight import Weight
from quire.speculative.drafting import DEPTHS, KEPT_SIZES, count_kept
from quire.weights.eagle import LoadedEagle

MAX_SPLITS = 16  # of a row's context


class TapBuffer(Taps):
    """Taps that are written to one buffer, side by side: [tokens, layers * hidden_size]."""

    def __init__(self, layers: tuple[int, ...], buffer: Tensor) -> None:
        super().__init__(layers)
        self._buffer = buffer
        self._count = 0

    def keep(self, x: Any, residual: Any) -> None:
        size = x.shape[1]
        first = self._count % len(self.layers) * size
        torch.add(x, residual, out=self._buffer[: len(x), first : first + size])
        self._count += 1


class GpuDrafter:
    """`output` is the matrix of the head's logits, and `draft_ids` [rows] the token of each of its rows, if they are
    not all. Drafts are the likeliest tokens."""

    def __init__(
        self,
        head: Eagle,
        output: Weight,
        draft_ids: Tensor | None,
        cache: LayerCache,
        buffers: GpuBuffers,
        ops: Kernels,
        max_depth: int,
        dtype: torch.dtype,
    ) -> None:
        device, max_rows = torch.device(ops.device), buffers.max_rows
        self.max_depth = max_depth
        self._head = head
        self._output = output
        self._draft_ids = draft_ids
        self._cache = cache
        self._buffers = buffers
        self._kv_heads = head.config.num_kv_heads
        self._exact = ops.exact
        num_entries = buffers.state.size + 1
        self.drafts = torch.zeros(max_depth, num_entries, dtype=torch.int64, device=device)
        self._states = torch.zeros(buffers.max_tokens, head.config.num_features, dtype=dtype, device=device)
        self._kept = Kept.allocate(count_kept(max_rows), head.config.num_features, dtype, device)
        self._num_kept = 0
        self._kept_for: Sequence[Request] = ()
        self._argmax = Argmax(max_rows, device)
        self._unused_entries = torch.arange(max_rows, dtype=torch.int32, device=device)
        self._unused_tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._best = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._max_logits = torch.zeros(max_rows, dtype=torch.float32, device=device)
        self._places: dict[tuple[int, int], Places] = {}

    def run_target(self, model: Decoder, batch: Batch, layers: Sequence[LayerCache], ends: Ends | None) -> Tensor:
        """The target's step, whose states are kept until the next one."""
        taps = TapBuffer(self._head.config.tap_layers, self._states)
        return model(batch.tokens, batch.positions, batch.paging, layers, ends, taps)

    def fill_drafts(self, batch: Batch, num_rows: int) -> None:
        """Put the drafts into the tokens of the step that verifies them."""
        entries = self._buffers.draft_entries.view(num_rows)
        fill_drafts(batch.tokens, batch.paging.query_starts, entries, self.drafts, num_rows)

    def store(self, batch: Batch, following: Tensor) -> None:
        """Store the keys of the step that was run last. following [tokens]: the token after each of its tokens."""
        count, slots = len(batch.tokens), batch.paging.slot_mapping[self._cache.group]
        features = self._head.fuse(self._states[:count])
        self._head.store(following[:count], features, batch.positions, slots, self._cache)

    def keep(self, plan: Plan, rows: Tensor | None, num_accepted: Tensor, paths: Tensor, last_tokens: Tensor) -> None:
        """Keep the states of the step that was run last, for `compute_kept`. rows: those of `accept_drafts`, None if
        the plan has single tokens only."""
        # Slots of a request that is not in this plan may be another's by now.
        is_same = len(plan) == len(self._kept_for) and all(map(is_, plan.requests, self._kept_for))
        num_rows = len(plan) if rows is None else len(rows)
        count = num_rows + sum(map(len, plan.drafts.values()))
        if not is_same or self._num_kept + count > len(self._kept.slots):
            self.compute_kept()
        self._kept_for = plan.requests
        buffers, total = self._buffers, plan.num_tokens
        slots = buffers.slot_mapping[self._cache.group].view(total)
        keep_states(
            self._kept, self._num_kept, rows, num_rows, max(map(len, plan.drafts.values()), default=0), num_accepted,
            paths, buffers.tokens.view(total), buffers.positions.view(total), slots, buffers.sample_entries.view(total),
            last_tokens, self._states,
        )  # fmt: skip
        self._num_kept += count

    def compute_kept(self) -> None:
        """Store the keys of all tokens whose states are kept."""
        if self._num_kept:
            self._store_kept(next(size for size in (*KEPT_SIZES, len(self._kept.slots)) if size >= self._num_kept))
            self._num_kept = 0
            self._kept_for = ()

    def prepare(self) -> None:
        """Run every kernel of `keep` and `compute_kept`, on no request's tokens."""
        rows, tokens = torch.zeros(1, FIELDS, dtype=torch.int32, device=self.drafts.device), self._unused_tokens[:1]
        entries = self._unused_entries[:1]
        for listed in (rows, None):
            keep_states(
                self._kept, 0, listed, 1, 0, entries, rows, tokens, tokens, tokens, entries, tokens, self._states
            )  # fmt: skip
        self._kept.slots.fill_(-1)
        for size in KEPT_SIZES:
            self._store_kept(min(size, len(self._kept.slots)))

    def _store_kept(self, count: int) -> None:
        states, tokens, positions, slots = (each[:count] for each in self._kept)
        self._head.store(tokens, self._head.fuse(states), positions, slots, self._cache)
        slots.fill_(-1)

    def draft(self, batch: Batch, following: Tensor, num_accepted: Tensor, num_rows: int, depth: int) -> Tensor:
        """Compute the tokens of the step that was run last, and `depth` drafts for each row, by its entry of the
        sampling state. following [tokens]: the token after each of the step's."""
        places, count = self._find_places(num_rows, depth), len(batch.tokens)
        states: Tensor
        features: Tensor = self._head.fuse(self._states[:count])
        states, features = self._head(following[:count], features, batch.positions, batch.paging, self._cache)
        buffers, paging, group = self._buffers, batch.paging, self._cache.group
        place_drafts(
            buffers.draft_rows.view(num_rows), num_accepted, paging.query_starts, paging.seq_lens,
            buffers.sample_entries.view(len(batch.tokens)), paging.block_tables[group], self._cache.block_size,
            buffers.state.padding_entry, places,
        )  # fmt: skip
        states, features = states[places.indices], features[places.indices]
        starts, tables = buffers.starts[: num_rows + 1], paging.block_tables
        for nth in range(depth):
            tokens = self._choose(states)
            self.drafts[nth].index_copy_(0, places.entries, tokens)
            if nth == depth - 1:
                break
            slots = [places.slots[nth]] * (group + 1)
            work = Work(True, False, {self._head.config.window: places.splits[nth]})
            own = Paging(starts, places.lengths[nth], tables, slots, self._cache.block_size, [], [], work=work)
            states, features = self._head(tokens, features, places.positions[nth], own, self._cache)
        return states

    def _choose(self, states: Tensor) -> Tensor:
        """The likeliest token of each row, [rows] int64."""
        rows = len(states)
        self._argmax(
            self._output.matmul(states), self._unused_entries[:rows], self._best, self._max_logits, self._unused_tokens
        )
        # Copies: the kernels of the next pass must not start while this one's still run (see `pdl.py`).
        return self._best[:rows].clone() if self._draft_ids is None else self._draft_ids[self._best[:rows]]

    def _find_places(self, num_rows: int, depth: int) -> Places:
        key = num_rows, depth
        if key not in self._places:
            num_splits = 1 if self._exact else find_num_splits(num_rows, self._kv_heads)
            self._places[key] = Places.allocate(num_rows, max(1, depth - 1), num_splits, self.drafts.device)
        return self._places[key]


def build_drafter(
    loaded: LoadedEagle, cache: LayerCache, target: Head, buffers: GpuBuffers, ops: Kernels, dtype: torch.dtype
) -> GpuDrafter:
    """`target` is the target's head, whose rows are the output of a head that has none."""
    draft_ids, output = None, loaded.output or target.weight
    if loaded.draft_ids is not None:
        draft_ids = torch.tensor(loaded.draft_ids, dtype=torch.int64, device=torch.device(ops.device))
        if loaded.output is None:
            assert ops.linear is not None
            output = Dense(target.weight.rows(draft_ids), ops.linear)
    return GpuDrafter(loaded.head, output, draft_ids, cache, buffers, ops, DEPTHS[-1], dtype)


def find_num_splits(num_rows: int, kv_heads: int) -> int:
    """The splits of each row, which together fill the GPU. All rows have as many, since their lengths are not known."""
    return max(1, min(MAX_SPLITS, split_kv.num_splits_to_fill(kv_heads) // num_rows))
