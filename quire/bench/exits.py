"""The logits of a text under early exit, for `quire compare`: the exit's where it is confident, and else the model's.

Each token is predicted from the text before it. An exit knows a request's own tokens, so those of the text that come
later are hidden from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.core.request import Request
from quire.engine.early_exit import EarlyExit
from quire.engine.engine import Engine
from quire.engine.runner import ModelRunner

FLOOR = 1e-9  # the probability of a token that an exit cannot give, so that means are finite

Floats = NDArray[np.float32]


class ExitedLogits:
    """Replaces rows of logits, and counts them. One text after the other."""

    def __init__(self, early_exit: EarlyExit, threshold: float) -> None:
        self.num_rows = 0
        self.num_exited = 0
        self.num_unreachable = 0  # of these, rows in which the exit cannot give the text's next token
        self._early_exit = early_exit
        self._threshold = threshold
        self._text: Sequence[int] = ()
        self._before = Request("compare", [0])

    def begin(self, text: Sequence[int]) -> None:
        self._text = text
        self._before = Request("compare", text[:1])

    def __call__(self, position: int, logits: Floats, states: Floats) -> Floats:
        """The rows of the tokens from `position` on. states [rows, hidden_size] after the first layers."""
        replaced = logits.copy()
        for row in range(len(logits)):
            self._before.tokens += self._text[len(self._before.tokens) : position + row + 1]
            exit_row = self._early_exit.exit_logits(states[row : row + 1], [self._before])[0]
            log_total = math.log(float(np.exp(exit_row.astype(np.float64) - float(exit_row.max())).sum()))
            self.num_rows += 1
            if self._early_exit.confidence(math.exp(-log_total)) >= self._threshold:
                self.num_exited += 1
                self.num_unreachable += not np.isfinite(exit_row[self._text[position + row + 1]])
                floor = float(exit_row.max()) + log_total + math.log(FLOOR)
                replaced[row] = np.where(np.isfinite(exit_row), exit_row, floor)
        return replaced


def exited_logits(engine: Engine, threshold: float) -> ExitedLogits:
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    assert runner.split is not None
    assert runner.split.early_exit is not None
    return ExitedLogits(runner.split.early_exit, threshold)
