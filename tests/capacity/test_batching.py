"""The same arrivals under three policies, and what a step consists of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.capacity.batching import LoadRequest, RandomLoad, compare_batching
from quire.capacity.profile import CapacityProfile, EngineSizes
from quire.capacity.step_cost import KNOTS, StepCost, decode_shape, prompt_shape
from quire.capacity.step_parts import predict_steps, split
from quire.errors import InvalidParams

pytestmark = pytest.mark.cpu

STEP_S, TOKEN_S, KEY_S = 0.1, 0.01, 0.001
SIZES = EngineSizes(200, 4, 64, 8, 120, (None,))


def cost():
    coefficients = [0.0] * (2 + 2 * len(KNOTS) + 2)
    coefficients[0], coefficients[2 + len(KNOTS) - 1], coefficients[-2] = STEP_S, TOKEN_S, KEY_S
    return StepCost((None,), tuple(coefficients))


PROFILE = CapacityProfile("m", "here", SIZES, cost(), 0.01, 0.05)


def profile_of(sizes):
    return replace(PROFILE, sizes=sizes, cost=replace(cost(), windows=sizes.windows))


def test_two_requests_by_hand():
    """The second arrives in the first one's only long step: it joins a continuous batch, and waits for a static one."""
    requests = [LoadRequest(0.0, 4, 3), LoadRequest(0.05, 4, 1)]
    found = compare_batching(PROFILE, requests, 2, 0.2)
    first, second = found["static"].requests
    assert first.started_s == 0.0
    assert second.started_s == pytest.approx(first.times[-1])
    first, second = found["continuous"].requests
    assert second.started_s == pytest.approx(STEP_S + 4 * TOKEN_S)
    assert second.times[-1] < first.times[-1]
    first, second = found["dynamic"].requests
    assert first.started_s == second.started_s
    assert first.started_s == pytest.approx(0.05, abs=2e-3)
    assert found["dynamic"].end_s == pytest.approx(first.times[-1])
    assert found["continuous"].mean_rows == pytest.approx(4 / found["continuous"].num_steps)


def test_a_load_has_the_same_requests_again_and_its_mean_length():
    load = RandomLoad(5.0, 64, 10, 40, spread=0.8, seed=3)
    assert load.requests() == load.requests()
    assert load.requests() != replace(load, seed=4).requests()
    lengths = [request.output_tokens for seed in range(40) for request in replace(load, seed=seed).requests()]
    assert sum(lengths) / len(lengths) == pytest.approx(40, rel=0.1)
    assert {request.output_tokens for request in replace(load, spread=0.0).requests()} == {40}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rate", 0.0),
        ("rate", float("inf")),
        ("num_requests", 0),
        ("num_requests", 65),
        ("prompt_tokens", 0),
        ("output_tokens", 513),
        ("spread", -0.1),
        ("spread", 2.1),
    ],
)
def test_a_load_without_bounds_is_refused(field, value):
    with pytest.raises(InvalidParams, match=field):
        replace(RandomLoad(1.0, 4, 10, 10), **{field: value})


def test_a_load_that_does_not_fit_is_refused():
    with pytest.raises(InvalidParams, match="121 tokens and needs 31 blocks; this engine takes at most 120"):
        compare_batching(PROFILE, [LoadRequest(0.0, 100, 21)], 2, 0.1)
    groups = replace(SIZES, windows=(None, None), num_blocks=50)  # each token is in two groups of layers
    with pytest.raises(InvalidParams, match="needs 60 blocks; this engine takes at most 120 tokens and has 50 blocks"):
        compare_batching(replace(PROFILE, sizes=groups), [LoadRequest(0.0, 100, 20)], 2, 0.1)
    with pytest.raises(InvalidParams, match="batch_size is 9"):
        compare_batching(PROFILE, [LoadRequest(0.0, 10, 2)], 9, 0.1)
    with pytest.raises(InvalidParams, match="batch_wait_s"):
        compare_batching(PROFILE, [LoadRequest(0.0, 10, 2)], 2, -1.0)


def test_the_parts_of_a_step_are_its_seconds():
    parts = split(cost(), decode_shape(5, 20, (None,)))
    assert parts.fixed_s == pytest.approx(STEP_S + TOKEN_S)
    assert parts.tokens_s == pytest.approx(4 * TOKEN_S)
    assert parts.cache_s == pytest.approx(5 * 20 * KEY_S)
    assert parts.seconds == pytest.approx(cost().seconds(decode_shape(5, 20, (None,))))
    prompt = split(cost(), prompt_shape(30, 0, (None,)))
    assert prompt.seconds == pytest.approx(STEP_S + 30 * TOKEN_S)


def test_predicted_steps_end_at_the_engine_s_limits():
    found = predict_steps(PROFILE, 100)
    assert [point["tokens"] for point in found["decode"]] == [1, 2, 3, 4, 6, 8]
    assert found["prompt"][-1]["tokens"] == 64
    assert found["fitting_requests"] == 8
    assert predict_steps(replace(PROFILE, sizes=replace(SIZES, num_blocks=60)), 100)["fitting_requests"] == 2
    windowed = replace(SIZES, windows=(8,), max_tokens_per_step=8, num_blocks=60)
    assert predict_steps(profile_of(windowed), 100)["fitting_requests"] == 8  # each holds at most 5 blocks
    with pytest.raises(InvalidParams, match="context_tokens is 121"):
        predict_steps(PROFILE, 121)
