"""InputStatistics: what a product was multiplied with, summed up. `calibration.py` and `expert_inputs.py` fill it."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Needs = Literal["nothing", "squares", "moments"]

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
