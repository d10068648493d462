"""BlockDrafter: runs a block head on quire's CPU kernels. It is a `DraftHead`.

Each place of a request is a paging row of its own, with one query and the request's block table. So the attention op
gives every place all computed tokens of the request, and none of the other places.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.core.request import Request
from quire.kernels.cpu.native import Native
from quire.kernels.cpu.recorded import StepPaging, StepTokens
from quire.kernels.cpu.tape import Tape
from quire.kernels.paging import LayerCache, Paging
from quire.layers.embedding import Embedding
from quire.models.block_head import BlockHead
from quire.speculative.draft_tree import Bias
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
        self.bias = make_bias(loaded.bigram, loaded.draft_ids, embedding.weight.shape[0]) if loaded.bigram else None
        self._head = loaded.head
        self._slots = loaded.slots
        self._embedding = embedding
        self._taps = [*(list(taps).index(layer) for layer in config.tap_layers), len(taps)]  # and the final state
        self._max_len = max_len
        self._kv = [kv[layer] for layer in config.kv_layers]
        self._layers = RecordedHead(loaded.head, self._kv, native, max_rows)

    def states(self, requests: Sequence[Request], features: Floats) -> Floats:
        tokens = np.array([request.tokens[-1] for request in requests], np.int64)
        embedded = np.asarray(self._embedding(tokens))  # type: ignore[arg-type]
        inputs = [*(features[:, tap] for tap in self._taps), embedded]
        eps = np.float32(self._head.config.norm_eps)
        normed = [rms_norm(x, weight, eps) for x, weight in zip(inputs, self._head.norms, strict=True)]
        joined: Floats = self._head.in_proj.matmul(np.concatenate(normed, axis=1))
        x = joined[:, None] + self._slots
        lengths = np.array([len(request.tokens) - 1 for request in requests])
        positions = np.minimum(lengths[:, None] + np.arange(self.depth), self._max_len - 1).reshape(-1)
        out = self._layers(x.reshape(-1, x.shape[2]), positions, self._page(requests, lengths))
        return out.reshape(x.shape)

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
    """The layers of a block head on a tape."""

    def __init__(self, head: BlockHead, kv: Sequence[LayerCache], native: Native, max_rows: int) -> None:
        self._tape = Tape(native, max_rows)
        self._input = self._tape.new((head.in_proj.shape[0],))  # kept: no op may reuse its memory
        self._input.read()
        groups = range(1 + max(cache.group for cache in kv))
        out = head(self._input, StepTokens(self._tape, True), StepPaging(groups), list(kv))
        out.read()
        self._tape.finish()
        self._inputs, self._outputs = (self._tape.result(value, max_rows) for value in (self._input, out))

    def __call__(self, x: Floats, positions: Ids, paging: Paging) -> Floats:
        """x [rows, hidden_size] -> [rows, hidden_size]. The next call overwrites it."""
        self._inputs[: len(x)] = x
        self._tape.run(None, positions, paging, len(x))
        return self._outputs[: len(x)]


def rms_norm(x: Floats, weight: Floats, eps: np.float32) -> Floats:
    normed: Floats = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + eps) * weight
    return normed


def make_bias(bigram: Bigram, draft_ids: Ids, vocab_size: int) -> Bias:
    index = np.full(vocab_size, -1, np.int64)  # of ids in the draft vocabulary
    index[draft_ids] = np.arange(len(draft_ids))

    def bias(token: int, tokens: Ids) -> Floats:
        """0 where one of the two is not in the draft vocabulary."""
        before, after = index[token], index[tokens]
        products = bigram.after[after] @ bigram.before[before]
        return np.where((after < 0) | (before < 0), np.float32(0), products)

    return bias
