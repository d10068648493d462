"""StepCost: the seconds of a step, from its plan alone. Fitted to the measured steps of an engine.

    seconds = sum of coefficient x feature, all coefficients at least 0

Features: 1 for a step, its sampled rows, its tokens in pieces (min(tokens, k) and max(0, tokens - k) for each k, since
kernels change with the number of tokens), and, for each cache group, the keys that rows of one token read and the pairs
of query and key of rows with more tokens. The fit minimizes relative errors. Ranges come from fits to resampled steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.core.plan import Plan

Floats = NDArray[np.float64]

KNOTS = (2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096)
FIRST_KEYS = 2 + 2 * len(KNOTS)  # the index of the first feature of keys; those before it are of rows and tokens
NUM_RESAMPLED = 20
MIN_STEP_S = 1e-6


class StepShape(NamedTuple):
    """What a step's cost depends on. `keys` and `pairs` have an entry for each cache group."""

    tokens: int
    sampled: int
    keys: tuple[float, ...]
    pairs: tuple[float, ...]


def shape_of(plan: Plan, windows: Sequence[int | None]) -> StepShape:
    """`windows` are those of the cache groups."""
    if plan.num_tokens == len(plan) and windows == (None,):  # the most frequent step, and the one with most rows
        return StepShape(len(plan), sum(plan.yields), (float(sum(plan.starts) + len(plan)),), (0.0,))
    keys, pairs = [0.0] * len(windows), [0.0] * len(windows)
    for start, count in zip(plan.starts, plan.counts, strict=True):
        for group, window in enumerate(windows):
            if count == 1:
                keys[group] += start + 1 if window is None else min(start + 1, window)
            else:
                pairs[group] += count_pairs(start, count, window)
    return StepShape(plan.num_tokens, sum(plan.yields), tuple(keys), tuple(pairs))


def count_pairs(start: int, count: int, window: int | None) -> float:
    """Pairs of query and key of `count` queries from position `start` on."""
    if window is None:
        return count * start + count * (count + 1) / 2
    num_growing = max(0, min(count, window - start))  # queries that see all keys before them
    return count_pairs(start, num_growing, None) + (count - num_growing) * window if num_growing else count * window


def decode_shape(batch: int, context: int, windows: Sequence[int | None]) -> StepShape:
    """A step in which each of `batch` requests of `context` tokens gets one more."""
    keys = tuple(batch * float(context if window is None else min(context, window)) for window in windows)
    return StepShape(batch, batch, keys, (0.0,) * len(windows))


def prompt_shape(count: int, start: int, windows: Sequence[int | None], *, is_last: bool = True) -> StepShape:
    """A step of `count` tokens of one prompt, from position `start` on. The last one of a prompt samples."""
    if count == 1:
        return decode_shape(1, start + 1, windows)._replace(sampled=int(is_last))
    pairs = tuple(count_pairs(start, count, window) for window in windows)
    return StepShape(count, int(is_last), (0.0,) * len(windows), pairs)


class Cost(Protocol):
    """What predicts the seconds of steps: `StepCost` from measurements, `Roofline` from rates."""

    @property
    def windows(self) -> tuple[int | None, ...]: ...

    def seconds(self, shape: StepShape) -> float: ...

    def range(self, shape: StepShape) -> tuple[float, float]: ...

    def alternatives(self) -> Sequence[Cost]: ...


def features(shape: StepShape) -> list[float]:
    tokens = shape.tokens
    pieces = [float(min(tokens, knot)) for knot in KNOTS] + [float(max(0, tokens - knot)) for knot in KNOTS]
    return [1.0, float(shape.sampled), *pieces, *shape.keys, *shape.pairs]


class MeasuredStep(NamedTuple):
    shape: StepShape
    seconds: float
    host_s: float = 0.0  # of them, planning and committing; 0 where a device hides that


@dataclass(frozen=True, slots=True)
class StepCost:
    """A fitted cost. `resampled` are coefficients of fits to resampled steps."""

    windows: tuple[int | None, ...]
    coefficients: tuple[float, ...]
    resampled: tuple[tuple[float, ...], ...] = field(default=(), repr=False)
    _by_tokens: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def seconds(self, shape: StepShape) -> float:
        """Called for every step of a simulation: what depends on the tokens alone is kept."""
        total = self._by_tokens.get(shape.tokens)
        if total is None:
            total = self._by_tokens[shape.tokens] = self._seconds_of_tokens(shape.tokens)
        total += self.coefficients[1] * shape.sampled
        for coefficient, amount in zip(self.coefficients[FIRST_KEYS:], shape.keys + shape.pairs, strict=True):
            total += coefficient * amount
        return max(MIN_STEP_S, total)

    def _seconds_of_tokens(self, tokens: int) -> float:
        """The step itself and its tokens in pieces."""
        none = (0.0,) * len(self.windows)
        pieces = features(StepShape(tokens, 0, none, none))[:FIRST_KEYS]
        return sum(a * b for a, b in zip(self.coefficients[:FIRST_KEYS], pieces, strict=True))

    def range(self, shape: StepShape) -> tuple[float, float]:
        """The 5th and the 95th percentile of the fits to resampled steps."""
        if not self.resampled:
            return self.seconds(shape), self.seconds(shape)
        values = np.array(self.resampled) @ np.array(features(shape))
        low, high = np.quantile(values, [0.05, 0.95])
        return max(MIN_STEP_S, float(low)), max(MIN_STEP_S, float(high))

    def alternatives(self) -> Sequence[StepCost]:
        """The fits to resampled steps, each as a cost."""
        return [StepCost(self.windows, each) for each in self.resampled]

    def to_dict(self) -> dict[str, Any]:
        return {
            "windows": list(self.windows),
            "coefficients": list(self.coefficients),
            "resampled": [list(each) for each in self.resampled],
        }

    @classmethod
    def of(cls, document: dict[str, Any]) -> StepCost:
        """From `to_dict`. Raises ValueError for what is no cost."""
        windows = tuple(None if window is None else int(window) for window in document["windows"])
        size = len(features(StepShape(1, 1, (0.0,) * len(windows), (0.0,) * len(windows))))
        rows = [document["coefficients"], *document["resampled"]]
        values = [tuple(float(value) for value in row) for row in rows]
        if any(len(row) != size or not all(0 <= value < float("inf") for value in row) for row in values):
            raise ValueError("the coefficients are not those of a step cost")
        return cls(windows, values[0], tuple(values[1:]))


def fit(
    steps: Sequence[MeasuredStep],
    windows: Sequence[int | None],
    seed: int = 0,
    *,
    num_resampled: int = NUM_RESAMPLED,
) -> StepCost:
    """The cost that fits the measured steps best."""
    assert steps
    matrix = np.array([features(step.shape) for step in steps])
    seconds = np.array([step.seconds for step in steps])
    rng = np.random.default_rng(seed)
    samples = [rng.integers(0, len(steps), len(steps)) for _ in range(num_resampled)]
    resampled = [tuple(relative_fit(matrix[rows], seconds[rows])) for rows in samples]
    return StepCost(tuple(windows), tuple(relative_fit(matrix, seconds)), tuple(resampled))


def fit_host(steps: Sequence[MeasuredStep]) -> tuple[float, float]:
    """The host's seconds of a step, and of each sampled row."""
    matrix = np.array([[1.0, step.shape.sampled] for step in steps])
    step_s, row_s = non_negative_least_squares(matrix, np.array([step.host_s for step in steps]))
    return float(step_s), float(row_s)


def relative_fit(matrix: Floats, seconds: Floats) -> list[float]:
    """Coefficients of at least 0 that minimize the squares of relative errors."""
    weighted = matrix / seconds[:, None]
    scale = np.maximum(np.abs(weighted).max(axis=0), 1e-300)
    solved = non_negative_least_squares(weighted / scale, np.ones(len(seconds))) / scale
    return [float(value) for value in solved]


def non_negative_least_squares(matrix: Floats, target: Floats, tolerance: float = 1e-9) -> Floats:
    """x >= 0 that minimizes |matrix x - target|, by the active-set method of Lawson and Hanson.

    Columns enter one at a time, the one whose gradient is largest first. Columns whose value would fall below 0 leave.
    """
    num_columns = matrix.shape[1]
    x = np.zeros(num_columns)
    active = np.zeros(num_columns, bool)
    for _ in range(10 * num_columns):
        gradient = matrix.T @ (target - matrix @ x)
        gradient[active] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance:
            break
        active[best] = True
        while True:
            solved = np.zeros(num_columns)
            solved[active] = np.linalg.lstsq(matrix[:, active], target, rcond=None)[0]
            if solved[active].min() > 0:
                break
            falling = active & (solved <= 0)
            steps = x[falling] / np.maximum(x[falling] - solved[falling], 1e-300)
            x = x + float(steps.min()) * (solved - x)
            active &= x > 1e-12
            if not active.any():
                break
        x = np.where(active, solved, 0.0)
    return x


def errors(cost: StepCost, steps: Sequence[MeasuredStep]) -> Floats:
    """Relative errors of the predicted seconds, without sign, sorted."""
    found = [abs(cost.seconds(step.shape) / step.seconds - 1) for step in steps]
    return np.sort(np.array(found))
