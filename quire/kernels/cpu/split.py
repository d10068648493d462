"""SplitModel: a model recorded on two tapes, the layers before an exit and those from it on. They share weights and
caches.

Called like a `RecordedModel` it runs both and gives the same bits. Self-speculation runs the first part alone, and the
second part for tokens whose first layers are computed. `engine/split_steps.py` and `engine/self_draft.py` call it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.kernels.cpu.native import Native
from quire.kernels.cpu.recorded import StepPaging, StepTokens
from quire.kernels.cpu.tape import Tape, Value
from quire.kernels.paging import LayerCache, Paging
from quire.kernels.taps import Taps, hidden_state

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


class SplitModel:
    """`layer` is the number of layers before the exit. The state there is x + residual, as a tap of layer - 1 is."""

    def __init__(
        self,
        model: Any,
        kv: Sequence[LayerCache],
        native: Native,
        max_tokens: int,
        layer: int,
        tap_layers: Sequence[int] = (),
    ) -> None:
        assert 0 < layer < len(kv)
        self.head = model.head
        self.layer = layer
        self.hidden_size = model.embedding.weight.shape[1]
        self.num_first_taps = sum(tap < layer for tap in tap_layers)
        self.num_second_taps = len(tap_layers) - self.num_first_taps
        self._kv = kv
        self._num_tokens = 0
        groups = StepPaging(range(1 + max(cache.group for cache in kv)))

        self._first = Tape(native, max_tokens)
        taps = Taps(tuple(tap for tap in tap_layers if tap < layer))
        tokens, positions = StepTokens(self._first), StepTokens(self._first, True)
        x, residual = model.run_layers(range(layer), model.embed(tokens, positions), positions, groups, kv, None, taps)
        self._state, *self._first_taps = finish(self._first, [hidden_state(x, residual), *taps.states], max_tokens)

        self._second = Tape(native, max_tokens)
        taps = Taps(tuple(tap for tap in tap_layers if tap >= layer))
        state = self._second.new((self.hidden_size,))  # kept: no op may reuse its memory
        positions = StepTokens(self._second, True)
        x, residual = model.run_layers(range(layer, len(kv)), state, positions, groups, kv, None, taps)
        hidden = model.norm.add(x, residual)[0]
        self._input, self._hidden, *self._second_taps = finish(self._second, [state, hidden, *taps.states], max_tokens)

    def __call__(self, tokens: Ids, positions: Ids, paging: Paging, kv: Sequence[LayerCache]) -> Floats:
        assert kv is self._kv
        return self.second(self.first(tokens, positions, paging), positions, paging)

    def first(self, tokens: Ids, positions: Ids, paging: Paging) -> Floats:
        """The states before layer `layer`, [tokens, hidden_size]. The next call overwrites them."""
        num_tokens = len(tokens)
        self._first.run(tokens, positions, paging, num_tokens)
        return self._state[:num_tokens]

    def second(self, states: Floats, positions: Ids, paging: Paging) -> Floats:
        """From these states to those after the last norm, [tokens, hidden_size]. The next call overwrites them."""
        self._num_tokens = num_tokens = len(states)
        self._input[:num_tokens] = states
        self._second.run(None, positions, paging, num_tokens)
        return self._hidden[:num_tokens]

    @property
    def taps(self) -> list[Floats]:
        """The hidden states after the tapped layers of the last call. The next call overwrites them."""
        return [*self.taps_of_first(self._num_tokens), *(tap[: self._num_tokens] for tap in self._second_taps)]

    def taps_of_first(self, num_tokens: int) -> list[Floats]:
        """Those of the last call of `first`, which computed that many tokens."""
        return [tap[:num_tokens] for tap in self._first_taps]


def finish(tape: Tape, values: Sequence[Value], max_tokens: int) -> list[Floats]:
    """The arrays of values, whose memory no op has reused."""
    for value in values:
        value.read()
    tape.finish()
    return [tape.result(value, max_tokens) for value in values]
