"""How much of a prompt a step takes beside answers that run."""

from __future__ import annotations

import pytest

from quire.core.pace import FIRST_TOKENS, MIN_TOKENS, Pace
from tests.core.test_scheduler import ask, make, step

pytestmark = pytest.mark.core


def test_a_step_that_seems_to_take_no_time_is_forgotten() -> None:
    pace = Pace(0.025, 1, 0.005, 20e-6)
    pace.learn(100, 0.0)
    for _ in range(100):
        pace.learn(0, 0.005)
    assert pace.decode_s == pytest.approx(0.005)


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
    assert Pace(0.025, 128, 0.001, 1.0).prompt_tokens(10, 64, 8192) == 64
    assert Pace(0.025, 128, 0.001, 1.0).prompt_tokens(10, 120, 8192) == 256 - 120
    assert Pace(0.0086, 128, 0.005, 20e-6).prompt_tokens(500, 60, 8192) == 256 - 60, "180 would cost as much"


def test_steps_grow_with_the_queue_up_to_a_bound() -> None:
    pace = Pace(0.025, 1, 0.005, 20e-6)
    assert pace.prompt_tokens(8000, 0, 8192) == 2000
    assert pace.prompt_tokens(1_000_000, 0, 8192) in (4749, 4750)


def test_who_waits_makes_progress_however_slow_steps_are() -> None:
    assert Pace(0.025, 1, 0.001, 1.0).prompt_tokens(10, 0, 8192) == MIN_TOKENS


def test_where_answers_alone_miss_the_target_prompts_get_a_share() -> None:
    assert Pace(0.025, 1, 0.110, 22e-6).prompt_tokens(1000, 0, 8192) == pytest.approx(2500, abs=1)
    assert Pace(0.025, 1, 0.110, 22e-6).prompt_tokens(1_000_000, 0, 100_000) == pytest.approx(25_000, abs=1)
    assert Pace(0.050, 1, 0.400, 2.5e-3).prompt_tokens(100, 0, 192) == pytest.approx(80, abs=1)


def test_before_anything_is_measured_steps_are_small() -> None:
    assert Pace(0.025).prompt_tokens(100_000, 0, 8192) == FIRST_TOKENS


def test_what_steps_take_is_learned() -> None:
    pace = Pace(0.025)
    pace.learn(0, 1.0)
    assert (pace.decode_s, pace.token_s) == (1.0, None)
    pace.learn(200, 3.0)
    assert pace.token_s == pytest.approx(2.0 / 200)
    pace.learn(200, 2.0)  # faster, half of which is believed
    assert pace.token_s == pytest.approx(1.5 / 200)
    pace.learn(0, 1.5)  # slower
    assert pace.decode_s == pytest.approx(1.15)


def test_one_step_that_hangs_is_not_believed() -> None:
    pace = Pace(0.025, 1, 0.005, 20e-6)
    pace.learn(500, 3.0)
    pace.learn(0, 2.0)
    assert pace.token_s == pytest.approx(26e-6)
    assert pace.decode_s == pytest.approx(0.0065)


def test_steps_with_prompts_say_how_long_those_without_take_at_most() -> None:
    pace = Pace(0.025, 1, 0.2, 20e-6)  # of one that hung, when there was no load
    pace.learn(1, 0.007)
    assert pace.decode_s == 0.007


def test_a_clock_that_does_not_see_a_step_pass_does_no_harm() -> None:
    pace = Pace(0.025)
    pace.learn(0, 0.0)
    pace.learn(500, 0.0)
    assert pace.prompt_tokens(10**6, 0, 8192) == 8192
    for _ in range(60):
        pace.learn(500, 0.01)
    assert pace.token_s == pytest.approx(20e-6, rel=0.2)


def test_who_is_computed_again_is_not_held_back_for_itself() -> None:
    scheduler = make(num_blocks=1000, max_tokens=400, pace=Pace(1.0, 1, 0.5, 0.005))
    resumed = ask("a", 300, max_tokens=100)
    resumed.tokens += [7] * 50  # its answer so far, of an engine that is no more
    scheduler.add(resumed)
    assert step(scheduler) == {"a": (0, 350)}


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
