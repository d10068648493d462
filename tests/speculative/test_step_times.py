"""Durations of steps by rows and drafts."""

from __future__ import annotations

import random

import pytest

from quire.speculative.step_times import FRESH_STEPS, PLAIN_EVERY, PLAIN_SOON, StepTimes, bucket

pytestmark = pytest.mark.core


def learned(seconds: dict[int, float], repeats: int = 40) -> StepTimes:
    times, rng = StepTimes(12.0), random.Random(1)
    for _ in range(repeats):
        for num_drafts, its_s in seconds.items():
            times.learn(1, num_drafts, its_s * rng.uniform(0.97, 1.03))
    return times


def test_what_was_measured_is_expected() -> None:
    times = learned({0: 0.004, 1: 0.0046, 3: 0.0049, 7: 0.007})
    ratios = times.ratios(1, 7)
    assert ratios[0] == 1.0
    assert ratios[1] == pytest.approx(1.15, rel=0.05)
    assert ratios[3] == pytest.approx(1.22, rel=0.05)
    assert ratios[2] == pytest.approx((ratios[1] + ratios[3]) / 2)
    assert ratios[7] == pytest.approx(1.75, rel=0.05)
    assert times.plain_s(1) == pytest.approx(0.004, rel=0.05)


def test_before_any_measurement_drafts_cost_half_of_what_the_device_suggests() -> None:
    """Else those that are dearer than they are worth by that guess would never be tried."""
    assert StepTimes(12.0).ratios(1, 12)[12] == pytest.approx(1.5)
    assert StepTimes(12.0).ratios(64, 64)[64] == pytest.approx(1.5)
    assert StepTimes(12.0).plain_s(1) is None


def test_the_number_of_drafts_grows_step_by_step() -> None:
    times = StepTimes(12.0)
    assert (times.max_drafts(1), times.max_drafts(64)) == (1, 16)
    times.learn(64, 0, 0.02)
    times.learn(64, 16, 0.025)
    assert times.max_drafts(64) == 48
    assert times.max_drafts(1) == 1


def test_one_interrupted_step_changes_little() -> None:
    times = learned({0: 0.004, 4: 0.005})
    before = times.ratios(1, 4)[4]
    times.learn(1, 4, 0.5)
    for _ in range(8):
        times.learn(1, 4, 0.005)
    assert times.ratios(1, 4)[4] < 1.15 * before
    first = StepTimes(12.0)
    for _ in range(20):
        first.learn(1, 0, 0.004)
    first.learn(1, 2, 0.04)  # the only one of its size
    first.learn(1, 4, 0.005)
    for _ in range(8):
        first.learn(1, 0, 0.004)
    assert first.ratios(1, 4)[2] <= first.ratios(1, 4)[4] < 2.0


def test_the_machine_becomes_slower_and_all_ratios_stay() -> None:
    times = learned({0: 0.004, 4: 0.006})
    for _ in range(60):
        times.learn(1, 0, 0.008)
    assert times.plain_s(1) == pytest.approx(0.008, rel=0.1)
    assert times.ratios(1, 4)[4] == pytest.approx(1.5, rel=0.1)


def test_a_plain_step_is_due_after_many_with_drafts() -> None:
    times = learned({0: 0.004, 4: 0.006})
    times.learn(1, 0, 0.004)
    for _ in range(PLAIN_EVERY):
        assert not times.is_plain_due(1)
        times.learn(1, 4, 0.006)
    assert times.is_plain_due(1)
    times.learn(1, 0, 0.004)
    assert not times.is_plain_due(1)


def test_a_slow_first_step_does_not_make_drafts_look_cheap() -> None:
    times = StepTimes(12.0)
    times.learn(1, 0, 0.012)
    for _ in range(4 * PLAIN_SOON):
        times.learn(1, 0 if times.is_plain_due(1) else 4, 0.004 if times.is_plain_due(1) else 0.008)
    assert times.plain_s(1) == pytest.approx(0.004)
    for _ in range(2 * PLAIN_EVERY):
        times.learn(1, 0 if times.is_plain_due(1) else 4, 0.004 if times.is_plain_due(1) else 0.008)
    assert times.ratios(1, 4)[4] == pytest.approx(2.0, rel=0.1)


def test_steps_long_after_a_plain_one_say_nothing_of_ratios() -> None:
    times = learned({0: 0.004, 4: 0.006})
    for _ in range(FRESH_STEPS):
        times.learn(1, 4, 0.006)
    for _ in range(40):
        times.learn(1, 4, 0.012)  # contexts grew, or the machine became slower
    assert times.ratios(1, 4)[4] == pytest.approx(1.5, rel=0.05)


def test_averages_stay_finite_over_a_long_time() -> None:
    times, rng = StepTimes(12.0), random.Random(9)
    for step in range(20_000):
        times.learn(1, 0 if step % 3 else rng.choice([1, 3, 4]), 0.004 * rng.choice([1.0, 1.0, 1.0, 1.02, 3.0]))
    plain_s = times.plain_s(1)
    assert plain_s is not None
    assert 0.003 < plain_s < 0.006
    assert 1.0 <= times.ratios(1, 4)[4] < 1.3


def test_ratios_never_decrease() -> None:
    rng = random.Random(3)
    for _ in range(50):
        times = StepTimes(12.0)
        for _ in range(30):
            times.learn(2, rng.randrange(20), rng.uniform(0.001, 0.01))
        ratios = times.ratios(2, 24)
        assert len(ratios) >= 25
        assert ratios == sorted(ratios)


def test_buckets_are_exact_when_small() -> None:
    assert [bucket(count) for count in range(17)] == list(range(17))
    assert all(abs(bucket(count) - count) <= count / 8 for count in range(17, 600))
