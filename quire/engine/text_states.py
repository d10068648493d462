"""TextStates: the hidden states of whole texts, computed by an engine's model beside its requests.

It has a cache of its own, for one step, so the engine's blocks stay as they are. `quire train-draft` reads the states.
With quire's own CPU kernels they have the bits of the engine's own steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.engine.cache import CacheTensors, lay_out, shape_blocks
from quire.engine.memory import CacheSize
from quire.engine.runner import ModelRunner
from quire.kernels import Kernels
from quire.kernels.arrays import Array, Arrays
from quire.kernels.cpu.recorded import RecordedModel
from quire.kernels.paging import Paging
from quire.models.decoder import Decoder

BLOCK_SIZE = 16


class States(NamedTuple):
    """Of one text. The next call overwrites them."""

    taps: list[Array]  # [tokens, hidden_size] after each tapped layer
    hidden: Array  # [tokens, hidden_size], after the last norm


class TextStates:
    """Computes texts of up to `max_tokens` tokens in all at once. A text is computed in one piece."""

    def __init__(
        self, model: Decoder, ops: Kernels, kv_dtype: str, tap_layers: Sequence[int], *, max_tokens: int
    ) -> None:
        specs = model.cache_specs()
        layout = lay_out(specs, shape_blocks(specs, ops, kv_dtype, BLOCK_SIZE))
        self.max_tokens = max_tokens
        self._arrays: Arrays = ops.arrays
        self._num_groups = len(layout.windows)
        # Each text may leave a part of its last block unused.
        num_blocks = self._num_groups * 2 * -(-max_tokens // BLOCK_SIZE)
        size = CacheSize(num_blocks, BLOCK_SIZE, layout.block_bytes, max_tokens, num_blocks)
        self._cache = CacheTensors(layout, size, ops.arrays)
        self._model = ops.record(model, self._cache.layers, max_tokens, tap_layers)

    def compute(self, texts: Sequence[Sequence[int]]) -> list[States]:
        """`fits` says which texts may be computed together."""
        assert self.fits([len(text) for text in texts])
        lengths = [len(text) for text in texts]
        starts = list(accumulate(lengths, initial=0))
        tokens = self._arrays.put([token for text in texts for token in text], "int64")
        positions = self._arrays.put(np.concatenate([np.arange(length) for length in lengths]), "int64")
        hidden = self._model(tokens, positions, self._page(starts, lengths), self._cache.layers)
        taps = getattr(self._model, "taps", [])
        spans = [slice(start, stop) for start, stop in pairwise(starts)]
        return [States([tap[span] for tap in taps], hidden[span]) for span in spans]

    def fits(self, lengths: Sequence[int]) -> bool:
        num_blocks = sum(-(-length // BLOCK_SIZE) for length in lengths)
        return sum(lengths) <= self.max_tokens and num_blocks <= 2 * -(-self.max_tokens // BLOCK_SIZE)

    def _page(self, starts: list[int], lengths: list[int]) -> Paging:
        tables = self._block_tables(lengths)
        slots = [
            np.concatenate([fill_slots(row, length) for row, length in zip(table, lengths, strict=True)])
            for table in tables
        ]
        put = self._arrays.put
        return Paging(
            put(starts, "int32"),
            put(lengths, "int32"),
            [put(table, "int32") for table in tables],
            [put(each, "int64") for each in slots],
            BLOCK_SIZE,
            starts,
            lengths,
        )

    def _block_tables(self, lengths: Sequence[int]) -> list[NDArray[np.int32]]:
        """Consecutive blocks, from block 1 on: block 0 is the null block."""
        counts = [-(-length // BLOCK_SIZE) for length in lengths]
        tables, block = [], 1
        for _ in range(self._num_groups):
            table = np.zeros((len(lengths), max(counts)), np.int32)
            for row, count in zip(table, counts, strict=True):
                row[:count] = np.arange(block, block + count)
                block += count
            tables.append(table)
        return tables


def fill_slots(blocks: NDArray[np.int32], length: int) -> NDArray[np.int64]:
    positions = np.arange(length)
    return blocks[positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE


def find_model(runner: ModelRunner) -> Decoder:
    """The model that a runner runs, before it was recorded."""
    return runner.model.model if isinstance(runner.model, RecordedModel) else runner.model
