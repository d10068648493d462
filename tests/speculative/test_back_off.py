"""How often what does not pay is tried: one rule for models that are asked and for a device that drafts by itself."""

from __future__ import annotations

from itertools import pairwise

import pytest

from quire.speculative.asking import Asked, choose_depth
from quire.speculative.back_off import MAX_WAIT, BackOff
from quire.speculative.drafting import Drafting
from quire.speculative.record import MAX_PAUSE, Record

pytestmark = pytest.mark.core

NO_GAIN = [1.0 + nth for nth in range(12)]  # each draft takes as long as a step


def tries(back_off: BackOff, num_steps: int) -> list[int]:
    return [step for step in range(num_steps) if back_off.is_due()]


def test_waits_double_up_to_a_limit() -> None:
    found = tries(BackOff(), 10_000)
    gaps = [later - earlier for earlier, later in pairwise(found)]
    assert found[0] == 0
    assert gaps[:4] == [16, 32, 64, 128]
    assert set(gaps[6:]) == {MAX_WAIT}


def test_after_a_success_the_next_trial_is_soon() -> None:
    back_off = BackOff()
    tries(back_off, 3000)
    assert back_off.left > 16
    back_off.reset()
    found = tries(back_off, 100)
    assert found[0] < 16
    assert found[1] - found[0] == 16


def test_a_model_and_a_device_are_tried_as_often() -> None:
    asked, drafting = Asked(rate=0.01), Drafting("eagle", 5)
    by_model = [choose_depth(asked, NO_GAIN, 1.0, 1, 1.0) for _ in range(500)]
    by_device = [drafting.choose_depth([0.01], 1, NO_GAIN) for _ in range(500)]
    assert by_model == by_device
    assert [step for step, depth in enumerate(by_model) if depth] == [0, 16, 48, 112, 240, 496]


def test_a_requests_shift_is_forgotten_while_nothing_is_verified() -> None:
    """It is what keeps its drafts from being verified."""
    record = Record(shifts={"suffix": -2.0})
    for _ in range(400):
        record.pauses(must_ask=False)
    assert -0.5 < record.shifts["suffix"] < 0.0


def test_a_request_of_which_nothing_is_verified_is_skipped_in_more_and_more_steps() -> None:
    record = Record()
    skipped = [record.pauses(must_ask=False) for _ in range(400)]
    assert not any(skipped[:12])
    assert sum(skipped[200:]) == 200 * MAX_PAUSE // (MAX_PAUSE + 1)
    assert not Record(pause=3).pauses(must_ask=True)
