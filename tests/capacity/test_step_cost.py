"""The cost of a step: its features, the fit, and what is refused."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quire.capacity.step_cost import (
    MeasuredStep,
    StepCost,
    StepShape,
    count_pairs,
    errors,
    features,
    fit,
    non_negative_least_squares,
    shape_of,
)
from quire.core.plan import Plan

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("window", [None, 1, 5, 16, 100])
def test_pairs_are_counted(window):
    for start in (0, 1, 4, 15, 40):
        for count in (1, 2, 7, 30):
            seen = (min(position + 1, window or position + 1) for position in range(start, start + count))
            assert count_pairs(start, count, window) == sum(seen), (start, count)


def test_the_shape_of_a_plan():
    plan = Plan(1, requests=[None] * 3, starts=[0, 9, 30], counts=[4, 1, 1], yields=[0, 1, 1])
    shape = shape_of(plan, [None, 8])
    assert shape == StepShape(6, 2, (10 + 31, 8 + 8), (10, 10))


def true_seconds(shape):
    return 1e-3 + 2e-6 * shape.sampled + 1e-5 * shape.tokens + 3e-5 * max(0, shape.tokens - 16) + 1e-8 * shape.keys[0]


def measured(count, noise, seed=1):
    rng = random.Random(seed)
    steps = []
    for _ in range(count):
        tokens = rng.choice([1, 2, 3, 8, 20, 64, 130, 192])
        shape = StepShape(tokens, rng.randrange(tokens + 1), (float(rng.randrange(50_000)),), (rng.random() * 1e5,))
        steps.append(MeasuredStep(shape, true_seconds(shape) * rng.gauss(1, noise)))
    return steps


def test_a_fit_predicts_steps_that_it_has_not_seen():
    cost = fit(measured(200, 0.0), [None])
    assert errors(cost, measured(100, 0.0, seed=2))[-1] < 0.01
    noisy = fit(measured(200, 0.05), [None])
    assert np.median(errors(noisy, measured(100, 0.0, seed=2))) < 0.03
    assert min(noisy.coefficients) >= 0


def test_ranges_contain_what_is_true():
    cost = fit(measured(150, 0.05), [None])
    inside = 0
    for step in measured(200, 0.0, seed=3):
        low, high = cost.range(step.shape)
        assert low <= high
        inside += 0.98 * low <= step.seconds <= 1.02 * high
    assert inside > 150
    assert len(cost.alternatives()) == 20
    assert fit(measured(150, 0.05), [None]) == cost  # the same steps give the same fit


@pytest.mark.parametrize("seed", range(20))
def test_non_negative_least_squares_finds_the_minimum(seed):
    """At the minimum no column can be raised, or lowered if it is above 0, to reduce the error."""
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(30, 8)), rng.normal(size=30)
    x = non_negative_least_squares(matrix, target)
    gradient = matrix.T @ (target - matrix @ x)
    assert (x >= 0).all()
    assert (gradient <= 1e-6).all()
    assert np.abs(gradient[x > 0]).max(initial=0.0) < 1e-6


def test_a_cost_survives_its_file():
    cost = fit(measured(60, 0.02), [None])
    assert StepCost.of(cost.to_dict()) == cost


@pytest.mark.parametrize(
    "change",
    [
        {"coefficients": [1.0]},
        {"coefficients": [-1.0] * len(features(StepShape(1, 1, (0.0,), (0.0,))))},
        {"coefficients": [float("nan")] * len(features(StepShape(1, 1, (0.0,), (0.0,))))},
        {"windows": [None, 5]},
        {"resampled": [[1.0]]},
    ],
)
def test_what_is_no_cost_is_refused(change):
    document = fit(measured(60, 0.02), [None]).to_dict()
    with pytest.raises(ValueError, match="not those of a step cost"):
        StepCost.of({**document, **change})
