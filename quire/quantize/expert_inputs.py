"""ExpertInputs: what each matrix of a layer's experts is multiplied with. `calibration.py` fills it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.kernels.routing import ExpertWeights
from quire.quantize.statistics import InputStatistics

Floats = NDArray[np.float32]

MIN_ROWS = 128  # an expert that fewer tokens chose is calibrated with the inputs of all tokens
SILU_FACTOR = 1.702  # of "clamped_silu"


class ExpertInputs:
    """The inputs of a mixture, and the experts that each token chose.

    Statistics are made for one expert at a time, when they are asked for: second moments of all would not fit.
    """

    def __init__(self, weights: ExpertWeights, *, moments: bool) -> None:
        self.weights = weights
        self.rare: set[int] = set()  # experts that were chosen by fewer than MIN_ROWS tokens
        self._moments = moments
        self._x: list[Floats] = []
        self._chosen: list[NDArray[np.int64]] = []
        self._last: tuple[int, InputStatistics] | None = None  # of gate, which are those of up

    def add(self, x: Floats, routes: Floats) -> None:
        """x [tokens, hidden], routes [tokens, 2 * top_k]: weights, then the numbers of the experts."""
        self._x.append(x.copy())
        self._chosen.append(routes[:, routes.shape[1] // 2 :].astype(np.int64))

    def of_input(self, expert: int) -> InputStatistics:
        """Of gate and up."""
        if self._last is None or self._last[0] != expert:
            self._last = expert, self._sum_up(self._rows(expert))
        return self._last[1]

    def of_inner(self, expert: int, gate: Floats, up: Floats) -> InputStatistics:
        """Of down, which is multiplied with what gate and up make of the inputs."""
        x, size = self._rows(expert), self.weights.size
        bias = self.weights.gate_up_bias
        pair = (0.0, 0.0) if bias is None else np.split(np.asarray(bias)[expert * 2 * size :][: 2 * size], 2)
        return self._sum_up(gated(self.weights, x @ gate.T + pair[0], x @ up.T + pair[1]))

    def _rows(self, expert: int) -> Floats:
        x: Floats = np.concatenate(self._x)
        chosen = np.concatenate(self._chosen)
        rows = (chosen == expert).any(1)
        if rows.sum() < MIN_ROWS:
            self.rare.add(expert)
            return x
        return np.ascontiguousarray(x[rows])

    def _sum_up(self, x: Floats) -> InputStatistics:
        statistics = InputStatistics(x.shape[1], moments=self._moments, total=len(x))
        statistics.add(x)
        return statistics


def gated(weights: ExpertWeights, gate: Floats, up: Floats) -> Floats:
    """activation(gate) * up, as the op `experts` computes it."""
    if weights.activation == "clamped_silu":
        gate, up = np.minimum(gate, weights.limit), np.clip(up, -weights.limit, weights.limit) + 1
        activated = gate / (1 + np.exp(-SILU_FACTOR * gate))
    elif weights.activation == "gelu_tanh":
        cubic = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        activated = gate / 2 * (1 + np.tanh(cubic))
    else:
        activated = gate / (1 + np.exp(-gate))
    return np.asarray(activated * up, np.float32)
