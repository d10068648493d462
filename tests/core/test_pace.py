"""How much of a prompt a step takes beside answers that run."""

from __future__ import annotations

import pytest

from quire.core.pace import FIRST_TOKENS, MIN_TOKENS, Pace
from tests.core.test_scheduler import ask, make, step

pytestmark = pytest.mark.core


def test_without_a_target_a_step_takes_what_fits() -> None:
    assert Pace().prompt_tokens(10_000, 0, 8192) == 8192


def test_a_step_takes_what_the_target_leaves_after_the_answers() -> None:
    pace = Pace(0.02501, 1, 0.005, 20e-6)
    assert pace.prompt_tokens(500, 0, 8192) == 1000
    assert pace.prompt_tokens(4000, 0, 8192) == 1000
    assert pace.prompt_tokens(4000, 0, 300) == 300


def test_whole_steps_are_as_large_as_they_can_be_for_the_same_time() -> None:
    pace = Pace(0.02501, 128, 0.005, 20e-6)
    assert pace.prompt_tokens(500, 60, 8192) == 1024 - 60
    assert pace.prompt_tokens(500, 200, 8192) == 1152 - 200
    assert pace.prompt_tokens(500, 0, 100) == 100
    assert Pace(0.025, 128, 0.5, 20e-6).prompt_tokens(10, 64, 8192) == 64
    assert Pace(0.025, 128, 0.5, 20e-6).prompt_tokens(10, 120, 8192) == MIN_TOKENS


def test_steps_grow_with_the_queue_up_to_a_bound() -> None:
    pace = Pace(0.025, 1, 0.005, 20e-6)
    assert pace.prompt_tokens(8000, 0, 8192) == 2000
    assert pace.prompt_tokens(1_000_000, 0, 8192) in (4749, 4750)


def test_who_waits_makes_progress_however_slow_steps_are() -> None:
    assert Pace(0.025, 1, 0.5, 20e-6).prompt_tokens(10, 0, 8192) == MIN_TOKENS
    assert Pace(0.025, 1, 0.001, 1.0).prompt_tokens(10, 0, 8192) == MIN_TOKENS


def test_before_anything_is_measured_steps_are_small() -> None:
    assert Pace(0.025).prompt_tokens(100_000, 0, 8192) == FIRST_TOKENS


def test_a_prompt_alone_takes_whole_steps_and_beside_an_answer_its_share() -> None:
    scheduler = make(num_blocks=1000, max_tokens=400, pace=Pace(1.0, 1, 0.5, 0.005))
    scheduler.add(ask("a", 500, max_tokens=100))
    assert step(scheduler) == {"a": (0, 400)}
    assert step(scheduler) == {"a": (400, 100)}
    scheduler.add(ask("b", 250, first=2000))
    scheduler.add(ask("c", 60, first=5000))
    assert step(scheduler) == {"a": (500, 1), "b": (0, 100)}
    assert step(scheduler) == {"a": (501, 1), "b": (100, 101)}
    assert step(scheduler) == {"a": (502, 1), "b": (201, 49), "c": (0, 52)}
    assert step(scheduler) == {"a": (503, 1), "b": (250, 1), "c": (52, 8)}
