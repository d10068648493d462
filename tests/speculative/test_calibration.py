"""From the odds of a proposer to chances."""

from __future__ import annotations

import random

import pytest

from quire.speculative.calibration import Calibration
from quire.speculative.ledger import Ledger

pytestmark = pytest.mark.core


@pytest.mark.parametrize("truth", [0.05, 0.5, 0.95])
def test_a_proposer_that_lies_about_its_odds_is_found_out(truth: float) -> None:
    calibration, rng = Calibration(), random.Random(2)
    for _ in range(500):
        calibration.learn("liar", 0.9, rng.random() < truth)
    assert calibration.chances("liar", [0.9])[0] == pytest.approx(truth, abs=0.06)
    assert calibration.chances("another", [0.9])[0] == pytest.approx(0.9, abs=0.02)


@pytest.mark.parametrize("odds", [-3.0, 0.0, 1.0, 17.0, float("inf"), float("-inf"), float("nan")])
def test_odds_may_be_any_number(odds: float) -> None:
    calibration = Calibration()
    calibration.learn("odd", odds, True)
    assert 0.0 < calibration.chances("odd", [odds])[0] < 1.0
    assert 0.0 < calibration.chances("odd", [odds], shift=2.0)[0] < 1.0


def test_odds_that_are_no_number_promise_nothing() -> None:
    assert Calibration().chances("odd", [float("nan")])[0] < 0.05


def test_what_was_learned_long_ago_is_forgotten() -> None:
    calibration = Calibration()
    for right in [True] * 10_000 + [False] * 2_500:
        calibration.learn("suffix", 0.5, right)
    assert calibration.chances("suffix", [0.5])[0] < 0.3


def test_the_shift_of_a_request_is_bounded() -> None:
    calibration, shift = Calibration(), 0.0
    for _ in range(500):
        calibration.learn("suffix", 0.5, True)
    for _ in range(500):
        calibration.learn("suffix", 0.5, True)
        shift = calibration.learn("suffix", 0.5, False, shift)
    assert shift == -2.0


def test_a_request_that_differs_from_others_gets_a_shift() -> None:
    calibration, shift = Calibration(), 0.0
    for _ in range(300):
        calibration.learn("suffix", 0.5, True)
        calibration.learn("suffix", 0.5, False)
    for _ in range(30):
        shift = calibration.learn("suffix", 0.5, False, shift)
    assert calibration.chances("suffix", [0.5], shift)[0] < 0.3
    assert -2.0 <= shift < 0.0


def test_a_ledger_stops_losses_and_forgives_with_time() -> None:
    ledger, step_s = Ledger(0.01), 0.004
    while ledger.may_lose(0.001, step_s) and ledger.total_s < 1.0:
        ledger.add(step_s + 0.001, step_s)
    assert ledger.total_s < 0.05
    lost = -ledger.balance_s
    assert lost <= 0.01 * ledger.total_s + step_s
    for _ in range(200):
        ledger.add(step_s, step_s)
    assert ledger.may_lose(0.001, step_s)


def test_a_gain_is_not_a_licence_to_lose_for_ever() -> None:
    ledger, step_s = Ledger(0.01), 0.004
    for _ in range(1000):
        ledger.add(step_s, 3 * step_s)
    num_losses = 0
    while ledger.may_lose(step_s, step_s) and num_losses < 100:
        ledger.add(2 * step_s, step_s)
        num_losses += 1
    assert num_losses < 40
