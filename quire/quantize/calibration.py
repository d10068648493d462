"""Runs a model over text, one layer at a time, and gathers what each of its products is multiplied with.

`Calibration.hidden` are the states of all tokens between two layers. A layer is recorded on a tape of its own, as the
engine records whole models, so the families' code runs unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quire.engine.text_states import TextStates
from quire.kernels.cpu.tape import Tape, Value
from quire.quantize.input_model import InputMatrix, InputModel

Floats = NDArray[np.float32]
Needs = Literal["nothing", "squares", "moments"]

BATCH_TOKENS = 2048  # tokens that a layer computes at once
SAMPLE_ROWS = 256  # inputs of each product that are kept, to measure errors


class InputStatistics:
    """What a product was multiplied with: x [tokens, cols], added up."""

    def __init__(self, cols: int, *, moments: bool, total: int) -> None:
        self.num_rows = 0
        self.squares = np.zeros(cols, np.float64)
        self.magnitudes = np.zeros(cols, np.float64)
        self.moments = np.zeros((cols, cols), np.float32) if moments else None
        self._sample: list[Floats] = []
        self._step = max(1, total // SAMPLE_ROWS)

    def add(self, x: Floats) -> None:
        first = -self.num_rows % self._step
        self._sample.append(x[first :: self._step].copy())
        self.num_rows += len(x)
        x = np.ascontiguousarray(x)
        self.squares += np.einsum("ij,ij->j", x, x, dtype=np.float64)
        self.magnitudes += np.abs(x).sum(0, dtype=np.float64)
        if self.moments is not None:
            self.moments += x.T @ x

    @property
    def mean_squares(self) -> Floats:
        return (self.squares / max(1, self.num_rows)).astype(np.float32)

    @property
    def mean_magnitudes(self) -> Floats:
        return (self.magnitudes / max(1, self.num_rows)).astype(np.float32)

    @property
    def sample(self) -> Floats:
        return np.concatenate(self._sample)

    def scale_inputs(self, factors: Floats) -> None:
        """As if each input had been divided by its factor."""
        self.squares /= np.square(factors, dtype=np.float64)
        self.magnitudes /= factors
        self._sample = [rows / factors for rows in self._sample]
        if self.moments is not None:
            self.moments /= np.outer(factors, factors)

    def error(self, values: Floats, quantized: Floats) -> float:
        """The mean square of the error of the outputs, as a share of that of the outputs."""
        outputs, errors = self.sample @ values.T, self.sample @ (values - quantized).T
        return float(
            np.square(errors, dtype=np.float64).sum() / max(np.square(outputs, dtype=np.float64).sum(), 1e-300)
        )


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

    def run(self, layer: int, needs: Needs, *, keep: bool) -> list[InputStatistics]:
        """Run a layer whose matrices are loaded. Statistics of its matrices; `keep` moves on to its outputs."""
        matrices = self.model.matrices(layer)
        batches = self._batches()
        capacity = max(sum(batch) for batch in batches)
        recorded = OneLayer(self.model.decoder.layers[layer], self.model.config.hidden_size)
        states = TextStates(recorded, self.model.ops, "float32", (), max_tokens=capacity)  # type: ignore[arg-type]
        statistics = [
            InputStatistics(matrix.cols, moments=needs == "moments", total=len(self.tokens)) for matrix in matrices
        ]
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


def gather(
    matrices: Sequence[InputMatrix], statistics: Sequence[InputStatistics], recorded: OneLayer, num_tokens: int
) -> None:
    assert recorded.tape is not None
    for matrix, found in zip(matrices, statistics, strict=True):
        assert matrix.input is not None, matrix.parts[0].name
        found.add(recorded.tape.result(matrix.input, num_tokens))
