"""RecordedEagle: an EAGLE head on tapes of quire's CPU kernels, and the rows that it computes. `eagle.py` calls it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from quire.core.request import Request
from quire.kernels.cpu.native import Native
from quire.kernels.cpu.recorded import StepPaging, StepTokens
from quire.kernels.cpu.tape import Tape
from quire.kernels.paging import LayerCache, Paging, forest_paths
from quire.models.eagle import Eagle

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(slots=True)
class EagleRow:
    """Tokens of a request that the head computes in one pass: a chain, or with `parents` the nodes of a draft tree.

    Its context begins at position `begin`, the first of a block: earlier blocks may lack keys of the head. Slots are
    counted from position `start` on, as those of the request.
    """

    request: Request
    begin: int
    start: int
    tokens: Sequence[int]  # those after the features' tokens
    features: Floats  # [tokens, width]
    parents: Sequence[int] | None = None

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    def positions(self) -> Ids:
        if self.parents is None:
            return np.arange(self.start, self.stop)
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return self.start + np.array(depths, np.int64)


class RecordedEagle:
    """One tape for features of the target, and one for those that the head has made."""

    def __init__(self, head: Eagle, cache: LayerCache, native: Native, max_tokens: int, max_nodes: int) -> None:
        self._cache = cache
        self._computed = EagleTape(head, cache, native, max_tokens, fuses=True)
        self._drafted = EagleTape(head, cache, native, max_nodes, fuses=False)

    def compute(self, rows: Sequence[EagleRow]) -> tuple[Floats, Floats]:
        """The rows of tokens that the target has computed. See `EagleTape`."""
        return self._run(self._computed, rows)

    def draft(self, rows: Sequence[EagleRow]) -> tuple[Floats, Floats]:
        """The rows of draft trees. See `EagleTape`."""
        return self._run(self._drafted, rows)

    def _run(self, tape: EagleTape, rows: Sequence[EagleRow]) -> tuple[Floats, Floats]:
        tokens = np.array([token for row in rows for token in row.tokens], np.int64)
        positions = np.concatenate([row.positions() for row in rows])
        features = np.concatenate([row.features for row in rows])
        return tape(tokens, features, positions, make_paging(rows, self._cache))


class EagleTape:
    """A head that is recorded once. With `fuses` the features are the target's."""

    def __init__(self, head: Eagle, cache: LayerCache, native: Native, max_tokens: int, *, fuses: bool) -> None:
        self._tape = Tape(native, max_tokens)
        self._input = self._tape.new((head.config.num_features if fuses else head.config.hidden_size,))
        self._input.read()  # kept: no op may reuse its memory
        features = head.fuse(self._input) if fuses else self._input
        groups = range(1 + cache.group)
        outputs = head(StepTokens(self._tape), features, StepTokens(self._tape, True), StepPaging(groups), cache)
        for value in outputs:
            value.read()
        self._tape.finish()
        self._features = self._tape.result(self._input, max_tokens)
        self._states, self._following = (self._tape.result(value, max_tokens) for value in outputs)

    def __call__(self, tokens: Ids, features: Floats, positions: Ids, paging: Paging) -> tuple[Floats, Floats]:
        """Returns the output's input, and the next features, [tokens, hidden_size] each. The next call overwrites
        them."""
        count = len(tokens)
        self._features[:count] = features
        self._tape.run(tokens, positions, paging, count)
        return self._states[:count], self._following[:count]


def make_paging(rows: Sequence[EagleRow], cache: LayerCache) -> Paging:
    """Tables begin with the block of the row's `begin`, and lengths count from there. So the head reads no block before
    it."""
    size, group = cache.block_size, cache.group
    counts = [len(row.tokens) for row in rows]
    starts = list(accumulate(counts, initial=0))
    seq_lens = [row.stop - row.begin for row in rows]
    table = np.zeros((len(rows), -(-max(seq_lens) // size)), np.int32)
    slots = np.empty(starts[-1], np.int64)
    for nth, row in enumerate(rows):
        blocks = row.request.tables[group][row.begin // size : -(-row.stop // size)]
        table[nth, : len(blocks)] = [block or 0 for block in blocks]
        indices = np.arange(row.start - row.begin, row.stop - row.begin)
        slots[starts[nth] : starts[nth + 1]] = table[nth, indices // size].astype(np.int64) * size + indices % size
    empty = np.zeros((len(rows), 1), np.int32)  # of other groups, which the head does not read
    return Paging(
        np.array(starts, np.int32),
        np.array(seq_lens, np.int32),
        [*(empty for _ in range(group)), table],
        [slots for _ in range(group + 1)],
        size,
        starts,
        seq_lens,
        paths=forest_paths(starts, [row.parents for row in rows]),
    )
