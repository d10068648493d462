"""MedusaDrafter: runs Medusa heads on quire's CPU kernels. It is a `DraftHead`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.core.request import Request
from quire.kernels.cpu.native import Native
from quire.kernels.cpu.tape import Tape
from quire.models.medusa import Medusa

Floats = NDArray[np.float32]


class MedusaDrafter:
    bigrams = None

    def __init__(self, heads: Medusa, hidden_size: int, native: Native, max_rows: int) -> None:
        self.depth = heads.config.num_heads
        self._tape = Tape(native, max_rows)
        self._input = self._tape.new((hidden_size,))  # kept: no op may reuse its memory
        self._input.read()
        outputs = heads(self._input)
        for value in outputs:
            value.read()
        self._tape.finish()
        self._hidden = self._tape.result(self._input, max_rows)
        self._outputs = [self._tape.result(value, max_rows) for value in outputs]

    def states(self, requests: Sequence[Request], features: Floats) -> Floats:
        count = len(requests)
        self._hidden[:count] = features[:, -1]  # the final hidden state
        self._tape.run(None, None, None, count)
        return np.stack([output[:count] for output in self._outputs], axis=1)
