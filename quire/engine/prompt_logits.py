"""The logits after the tokens of a prompt: whole rows, where `prompt_logprobs` has only the likeliest tokens.

The prompt is a request like any other, so its logits are those of the engine's own kernels, cache and chunks. With
`ExitedLogits` they are those of an exit where that is confident.
`quire compare` calls this.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from quire.core.params import SamplingParams
from quire.core.request import Finish, Request
from quire.engine.engine import Engine
from quire.engine.runner import ModelRunner
from quire.errors import EngineError, InvalidParams
from quire.kernels.arrays import Array

FLOOR = 1e-9  # the probability of a token that an exit cannot give, so that means are finite

Rows = NDArray[np.float32]
Replace = Callable[[int, Rows, Rows], Rows]  # from a position, logits, and states at the exit to the logits to return

_numbers = itertools.count()


def prompt_logits(engine: Engine, tokens: Sequence[int], replace: Replace | None = None) -> Iterator[Rows]:
    """Logits after each token of a prompt except its last, in order, as arrays of [a few, vocab_size].

    Row i predicts token i + 1. The rows of one step are in memory at the same time. The engine must have no other
    requests. Closing the iterator ends the request. `replace` needs an engine with an exit.
    """
    if len(tokens) < 2:
        raise InvalidParams(f"The prompt has {len(tokens)} tokens; give at least 2: the first one is not predicted.")
    runner = model_runner(engine)
    assert not engine.has_work, "the engine has other requests"
    chunks: list[Rows] = []

    def keep(request: Request, position: int, logits: Array, states: Array | None) -> None:
        rows: Rows = runner.ops.arrays.to_numpy(logits)
        if replace is not None:
            assert states is not None
            rows = replace(position, rows, states)
        chunks.append(rows)

    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    request = Request(f"prompt-logits-{next(_numbers)}", tokens, params, max_tokens=0)
    runner.on_prompt_logits = keep
    try:
        engine.add(request)
        while engine.has_work:
            updates = engine.step()
            yield from chunks
            chunks.clear()
            for update in updates:
                if update.finish is Finish.ERROR:
                    raise EngineError(update.detail.message if update.detail else "The engine failed on this prompt.")
    finally:
        runner.on_prompt_logits = None
        engine.abort(request.id)


def model_runner(engine: Engine) -> ModelRunner:
    assert isinstance(engine.runner, ModelRunner)
    return engine.runner


class ExitedLogits:
    """The logits of a text under early exit: the exit's where it is confident, and else the model's. Counts them.

    Each token is predicted from the text before it. An exit knows a request's own tokens, so those of the text that
    come later are hidden from it.
    """

    def __init__(self, engine: Engine, threshold: float) -> None:
        split = model_runner(engine).split
        assert split is not None
        assert split.early_exit is not None
        self.layer = split.model.layer
        self.num_rows = 0
        self.num_exited = 0
        self.num_unreachable = 0  # of these, rows in which the exit cannot give the text's next token
        self._early_exit = split.early_exit
        self._threshold = threshold
        self._text: Sequence[int] = ()
        self._before = Request("compare", [0])

    def begin(self, text: Sequence[int]) -> None:
        self._text = text
        self._before = Request("compare", text[:1])

    def __call__(self, position: int, logits: Rows, states: Rows) -> Rows:
        """The rows of the tokens from `position` on. states [rows, hidden_size] after the first layers."""
        replaced = logits.copy()
        for row in range(len(logits)):
            self._before.tokens += self._text[len(self._before.tokens) : position + row + 1]
            with np.errstate(all="ignore"):  # a head may have any values; what is no number does not exit
                exit_row = self._early_exit.exit_logits(states[row : row + 1], [self._before])[0]
                log_total = math.log(float(np.exp(exit_row.astype(np.float64) - float(exit_row.max())).sum()))
            self.num_rows += 1
            if self._early_exit.confidence(math.exp(-log_total)) >= self._threshold:
                self.num_exited += 1
                self.num_unreachable += not np.isfinite(exit_row[self._text[position + row + 1]])
                floor = float(exit_row.max()) + log_total + math.log(FLOOR)
                replaced[row] = np.where(np.isfinite(exit_row), exit_row, floor)
        return replaced
