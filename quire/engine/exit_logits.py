"""ExitLogits: the logits of an exit, from the hidden state after the first layers of the target.

Self-speculation drafts with them (`self_draft.py`), and early exit takes tokens from them (`early_exit.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.core.request import Request
from quire.engine.draft_vocabulary import TrimmedVocabulary
from quire.kernels.cpu.native import Native
from quire.kernels.cpu.tape import Tape
from quire.layers.embedding import Head

MAX_ROWS = 64  # of one pass

Floats = NDArray[np.float32]


class ExitLogits:
    """`network` makes the input of the output matrix. That is the target's head, or those of its rows that are in the
    trimmed vocabulary, and each request's own tokens.
    """

    def __init__(
        self, network: Callable[[Any], Any], head: Head, native: Native, vocabulary: TrimmedVocabulary | None = None
    ) -> None:
        vocab_size, hidden_size = head.weight.shape
        self._head = head
        self._vocabulary = vocabulary
        self._logits = np.empty((MAX_ROWS, vocab_size), np.float32) if vocabulary is not None else None
        self._tape = Tape(native, MAX_ROWS)
        state = self._tape.new((hidden_size,))  # kept: no op may reuse its memory
        state.read()
        out = network(state)
        out.read()
        self._tape.finish()
        self._input, self._output = (self._tape.result(value, MAX_ROWS) for value in (state, out))

    def __call__(self, states: Floats, requests: Sequence[Request]) -> Floats:
        """states [requests, hidden_size] after the last token of each -> [requests, vocab]. At most MAX_ROWS. The next
        call overwrites the logits."""
        count = len(states)
        self._input[:count] = states
        self._tape.run(None, None, None, count)
        hidden = self._output[:count]
        if self._vocabulary is None or self._logits is None:
            logits: Floats = self._head(hidden)  # type: ignore[arg-type, assignment]
            return logits
        trimmed = self._vocabulary.logits(np.ascontiguousarray(hidden)[:, None], requests)
        self._vocabulary.spread(trimmed, requests, self._logits[:count])
        return self._logits[:count]

    def finish(self, request_id: str) -> None:
        if self._vocabulary is not None:
            self._vocabulary.finish(request_id)

    def reset(self) -> None:
        if self._vocabulary is not None:
            self._vocabulary.reset()
