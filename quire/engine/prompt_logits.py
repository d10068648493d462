"""The logits after the tokens of a prompt: whole rows, where `prompt_logprobs` has only the likeliest tokens.

The prompt is a request like any other, so its logits are those of the engine's own kernels, cache and chunks.
`quire compare` calls this.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from quire.core.params import SamplingParams
from quire.core.request import Finish, Request
from quire.engine.engine import Engine
from quire.engine.runner import ModelRunner
from quire.errors import EngineError, InvalidParams
from quire.kernels.arrays import Array

_numbers = itertools.count()


Rows = NDArray[np.float32]
Replace = Callable[[int, Rows, Rows], Rows]  # from a position, logits, and states at the exit to the logits to return


def prompt_logits(engine: Engine, tokens: Sequence[int], replace: Replace | None = None) -> Iterator[Rows]:
    """Logits after each token of a prompt except its last, in order, as arrays of [a few, vocab_size].

    Row i predicts token i + 1. The rows of one step are in memory at the same time. The engine must have no other
    requests. Closing the iterator ends the request. `replace` needs an engine with an exit.
    """
    if len(tokens) < 2:
        raise InvalidParams(f"The prompt has {len(tokens)} tokens; give at least 2: the first one is not predicted.")
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
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
