"""Runs a model over text, one layer at a time, and gathers what each of its products is multiplied with.

`Calibration.hidden` are the states of all tokens between two layers. A layer is recorded on a tape of its own, as the
engine records whole models, so the families' code runs unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.engine.text_states import TextStates
from quire.kernels.cpu.tape import Tape, Value
from quire.quantize.expert_inputs import ExpertInputs
from quire.quantize.input_model import InputMatrix, InputModel
from quire.quantize.statistics import InputStatistics, Needs

Floats = NDArray[np.float32]

Statistics = InputStatistics | ExpertInputs | None

BATCH_TOKENS = 2048  # tokens that a layer computes at once


@dataclass(slots=True)
class OneLayer:
    """A layer as `TextStates` calls a model. Its input is not tokens: `input` is filled before each call."""

    layer: Any
    hidden_size: int
    tape: Tape | None = None
    input: Value | None = None
    head = None

    def cache_specs(self) -> list[Any]:
        return [self.layer.attention.cache_spec]

    def __call__(self, tokens: Any, positions: Any, paging: Any, kv: Any) -> Value:
        self.tape = tokens.tape
        self.input = self.tape.new((self.hidden_size,))
        self.input.read()
        x, residual = self.layer(self.input, None, positions, paging, kv[0])
        output: Value = x + residual
        return output


class Calibration:
    """Windows of tokens, and their hidden states before the next layer."""

    def __init__(self, model: InputModel, windows: Sequence[Sequence[int]]) -> None:
        self.model = model
        self.lengths = [len(window) for window in windows]
        self.tokens = np.concatenate([np.array(window, np.int64) for window in windows])
        self.hidden = np.zeros((len(self.tokens), model.config.hidden_size), np.float32)

    def embed(self) -> None:
        """The hidden states before the first layer. Needs the embedding's matrices to be loaded."""
        positions = np.concatenate([np.arange(length) for length in self.lengths])
        decoder: Any = self.model.decoder
        self.hidden = np.ascontiguousarray(decoder.embed(self.tokens, positions), np.float32)

    def run(self, layer: int, needs: Needs, *, keep: bool) -> list[Statistics]:
        """Run a layer whose matrices are loaded. Statistics of its matrices; `keep` moves on to its outputs."""
        matrices = self.model.matrices(layer)
        batches = self._batches()
        capacity = max(sum(batch) for batch in batches)
        recorded = OneLayer(self.model.decoder.layers[layer], self.model.config.hidden_size)
        states = TextStates(recorded, self.model.ops, "float32", (), max_tokens=capacity)  # type: ignore[arg-type]
        self.model.attach_latent(layer)
        statistics = new_statistics(matrices, needs, len(self.tokens))
        outputs = self.hidden if keep else np.empty_like(self.hidden)
        first = 0
        for batch in batches:
            stop = first + sum(batch)
            outputs[first:stop] = self._compute(recorded, states, batch, first)
            if needs != "nothing":
                gather(matrices, statistics, recorded, stop - first)
            first = stop
        return statistics

    def _compute(self, recorded: OneLayer, states: TextStates, batch: Sequence[int], first: int) -> Floats:
        assert recorded.tape is not None
        assert recorded.input is not None
        recorded.tape.result(recorded.input, sum(batch))[...] = self.hidden[first : first + sum(batch)]
        computed = states.compute([range(length) for length in batch])
        return np.concatenate([each.hidden for each in computed])

    def head_inputs(self) -> InputStatistics:
        """What the head is multiplied with, after the last layer."""
        statistics = InputStatistics(self.model.config.hidden_size, moments=False, total=len(self.tokens))
        for first in range(0, len(self.hidden), BATCH_TOKENS):
            statistics.add(as_arrays(self.model.decoder.norm)(self.hidden[first : first + BATCH_TOKENS]))
        return statistics

    def _batches(self) -> list[list[int]]:
        """Lengths of windows that are computed together."""
        batches: list[list[int]] = [[]]
        for length in self.lengths:
            if batches[-1] and sum(batches[-1]) + length > BATCH_TOKENS:
                batches.append([])
            batches[-1].append(length)
        return batches


def as_arrays(module: Any) -> Callable[[Any], Floats]:
    """A module on numpy arrays: quire's CPU kernels take them in place of tensors."""
    run: Callable[[Any], Floats] = module
    return run


def new_statistics(matrices: Sequence[InputMatrix], needs: Needs, num_tokens: int) -> list[Statistics]:
    """The matrices of a mixture share theirs. None for what has no inputs of its own: latent attention's values are
    read from the tensor of the keys."""
    mixtures: dict[int, ExpertInputs] = {}
    found: list[Statistics] = []
    for matrix in matrices:
        if matrix.experts is not None:
            new = ExpertInputs(matrix.experts, moments=needs == "moments")
            found.append(mixtures.setdefault(id(matrix.experts), new))
        elif matrix.input is None:
            found.append(None)
        else:
            found.append(InputStatistics(matrix.input.width, moments=needs == "moments", total=num_tokens))
    return found


def gather(
    matrices: Sequence[InputMatrix], statistics: Sequence[Statistics], recorded: OneLayer, num_tokens: int
) -> None:
    assert recorded.tape is not None
    for matrix, found in zip(matrices, statistics, strict=True):
        if found is None or (matrix.experts is not None and matrix is not matrix.experts.gate_up):
            continue
        assert matrix.input is not None, matrix.parts[0].name
        x = recorded.tape.result(matrix.input, num_tokens)
        if isinstance(found, ExpertInputs):
            assert matrix.routes is not None
            found.add(x, recorded.tape.result(matrix.routes, num_tokens))
        else:
            found.add(x)
