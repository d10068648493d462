"""BlockDrafter: runs a block head on quire's CPU kernels. It is a `DraftHead`.

Each place of a request is a paging row of its own, with one query and the request's block table. So the attention op
gives every place all computed tokens of the request, and none of the other places.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.core.request import Request
from quire.engine.heads import Bigrams
from quire.kernels.cpu.native import Native
from quire.kernels.cpu.recorded import StepPaging, StepTokens
from quire.kernels.cpu.tape import Tape
from quire.kernels.paging import LayerCache, Paging
from quire.layers.embedding import Embedding
from quire.weights.heads import Bigram, LoadedBlockHead

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


class BlockDrafter:
    """`kv` are the target's caches, `taps` the layers whose states features have, `max_len` the longest context."""

    def __init__(
        self,
        loaded: LoadedBlockHead,
        embedding: Embedding,
        kv: Sequence[LayerCache],
        taps: Sequence[int],
        native: Native,
        *,
        max_len: int,
        max_rows: int,
    ) -> None:
        config = loaded.head.config
        self.depth = config.depth
        vocab_size = embedding.weight.shape[0]
        self.bigrams = index_bigrams(loaded.bigram, loaded.draft_ids, vocab_size) if loaded.bigram else None
        self._embedding = embedding
        self._weights = np.stack([np.asarray(weight) for weight in loaded.head.norms])  # [inputs, hidden_size]
        self._eps = np.float32(config.norm_eps)
        self._taps = [*(list(taps).index(layer) for layer in config.tap_layers), len(taps)]  # and the final state
        self._max_len = max_len
        self._kv = [kv[layer] for layer in config.kv_layers]
        self._layers = RecordedHead(loaded, self._kv, native, max_rows)

    def states(self, requests: Sequence[Request], features: Floats) -> Floats:
        tokens = np.array([request.tokens[-1] for request in requests], np.int64)
        embedded = np.asarray(self._embedding(tokens))  # type: ignore[arg-type]
        inputs = np.concatenate((features[:, self._taps], embedded[:, None]), axis=1)
        lengths = np.array([len(request.tokens) - 1 for request in requests])
        positions = np.minimum(lengths[:, None] + np.arange(self.depth), self._max_len - 1).reshape(-1)
        return self._layers(rms_norm(inputs, self._weights, self._eps), positions, self._page(requests, lengths))

    def _page(self, requests: Sequence[Request], lengths: Ids) -> Paging:
        block_size = self._kv[0].block_size
        num_blocks = -(-int(lengths.max()) // block_size)
        groups = {cache.group for cache in self._kv}
        tables = [
            self._table(requests, group, num_blocks) if group in groups else np.zeros((1, 1), np.int32)
            for group in range(1 + max(groups))
        ]
        seq_lens = np.repeat(lengths, self.depth).astype(np.int32)
        starts = np.arange(len(seq_lens) + 1, dtype=np.int32)
        return Paging(starts, seq_lens, tables, [], block_size, starts.tolist(), seq_lens.tolist())

    def _table(self, requests: Sequence[Request], group: int, num_blocks: int) -> NDArray[np.int32]:
        table = np.zeros((len(requests), num_blocks), np.int32)
        for row, request in zip(table, requests, strict=True):
            blocks = [block or 0 for block in request.tables[group][:num_blocks]]
            row[: len(blocks)] = blocks
        return np.repeat(table, self.depth, axis=0)


class RecordedHead:
    """A block head on a tape, from its normed inputs to its last norm: one call for all. Each place is a row, and the
    first product is computed for each: it takes as long as reading its weights."""

    def __init__(self, loaded: LoadedBlockHead, kv: Sequence[LayerCache], native: Native, max_rows: int) -> None:
        head, self._depth = loaded.head, loaded.head.config.depth
        size, width = head.in_proj.shape
        self._tape = Tape(native, max_rows)
        self._input, self._slots = self._tape.new((width,)), self._tape.new((size,))  # kept: no op reuses their memory
        self._input.read()
        groups = range(1 + max(cache.group for cache in kv))
        x = head.in_proj.matmul(self._input) + self._slots
        out = head(x, StepTokens(self._tape, True), StepPaging(groups), list(kv))
        out.read()
        self._tape.finish()
        self._inputs, self._outputs = (self._tape.result(value, max_rows) for value in (self._input, out))
        slots = self._tape.result(self._slots, max_rows)
        slots[:] = np.resize(loaded.slots, slots.shape)  # row i has the slot of place i modulo depth

    def __call__(self, x: Floats, positions: Ids, paging: Paging) -> Floats:
        """x [requests, inputs, hidden_size] -> [requests, depth, hidden_size]. The next call overwrites it."""
        num_rows = len(x) * self._depth
        self._inputs[:num_rows] = np.repeat(x.reshape(len(x), -1), self._depth, axis=0)
        self._tape.run(None, positions, paging, num_rows)
        return self._outputs[:num_rows].reshape(len(x), self._depth, -1)


def rms_norm(x: Floats, weight: Floats, eps: np.float32) -> Floats:
    """x [..., hidden_size]"""
    normed: Floats = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight
    return normed


def index_bigrams(bigram: Bigram, draft_ids: Ids, vocab_size: int) -> Bigrams:
    index = np.full(vocab_size, -1, np.int64)
    index[draft_ids] = np.arange(len(draft_ids))
    before, after = (np.ascontiguousarray(each, np.float32) for each in (bigram.before, bigram.after))
    return Bigrams(before, after, index)
