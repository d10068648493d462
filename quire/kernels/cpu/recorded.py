"""RecordedModel: a model whose forward pass is recorded on a tape and runs in one call a step.

It is called like the model it was made from. The engine gets one from the `record` op. The model computes the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.kernels.cpu.native import Native
from quire.kernels.cpu.tape import Tape
from quire.kernels.paging import LayerCache, Paging
from quire.kernels.taps import Taps

FEW_ROWS = 3  # up to here a meeting takes longer than the norms that it would divide


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Stands in for the token ids, or for their positions, while a model is recorded."""

    tape: Tape
    are_positions: bool = False


@dataclass(frozen=True, slots=True)
class StepPaging:
    """Stands in for a Paging while a model is recorded. Ops record a group's index; `run` gets the tables."""

    slot_mapping: Sequence[int]


class Recording:
    """A model on a tape, for steps of up to `max_tokens` tokens. `few_rows` are those of a `Tape`."""

    def __init__(
        self,
        model: Any,
        kv: Sequence[LayerCache],
        native: Native,
        max_tokens: int,
        tap_layers: Sequence[int] = (),
        *,
        few_rows: bool = False,
    ) -> None:
        self.tape = Tape(native, max_tokens, few_rows=few_rows)
        groups = range(1 + max(cache.group for cache in kv))
        taps = Taps(tuple(tap_layers))
        inputs = StepTokens(self.tape), StepTokens(self.tape, True), StepPaging(groups)
        hidden = model(*inputs, kv, None, taps) if tap_layers else model(*inputs, kv)
        values = [hidden, *taps.states]  # no op reuses their memory while the tape is recorded
        for value in values:
            value.read()
        self.tape.finish()
        self.result, *self.taps = (self.tape.result(value, max_tokens) for value in values)


class RecordedModel:
    """A model, its caches and the tape of its forward pass. With several ranks, steps of few rows have their own."""

    def __init__(
        self,
        model: Any,
        kv: Sequence[LayerCache],
        native: Native,
        max_tokens: int,
        tap_layers: Sequence[int] = (),
    ) -> None:
        self.model = model
        self.head = model.head
        self._kv = kv
        self._whole = self._last = Recording(model, kv, native, max_tokens, tap_layers)
        self._few_rows: Recording | None = None
        if self.tape.shares_norms:
            self._few_rows = Recording(model, kv, native, min(FEW_ROWS, max_tokens), tap_layers, few_rows=True)
        self._num_tokens = 0

    def __call__(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], paging: Paging, kv: Sequence[LayerCache]
    ) -> NDArray[np.float32]:
        assert kv is self._kv
        self._num_tokens = num_tokens = tokens.shape[0]
        self._last = self._recording(num_tokens)
        self._last.tape.run(tokens, positions, paging, num_tokens)
        return self._last.result[:num_tokens]

    def run_words(self, words: Sequence[int], base: int) -> None:
        """On another rank: the step of a command. The pages that rank 0 shares begin at `base`."""
        self._recording(words[0]).tape.run_words(words, base)

    def _recording(self, num_tokens: int) -> Recording:
        return self._whole if self._few_rows is None or num_tokens > FEW_ROWS else self._few_rows

    @property
    def tape(self) -> Tape:
        """That of the largest steps."""
        return self._whole.tape

    @property
    def taps(self) -> list[NDArray[np.float32]]:
        """The hidden states after the tapped layers, [num_tokens, hidden_size] each. The next call overwrites them."""
        return [tap[: self._num_tokens] for tap in self._last.taps]
