"""The meter of steps: what it compares, what it fits, and what it must not take for a measure."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from quire.capacity.profile import EngineSizes, load_profile
from quire.capacity.step_cost import StepShape, decode_shape, prompt_shape
from quire.config import EngineConfig
from quire.core.drafts import Drafts
from quire.core.plan import Plan, Sampled
from quire.engine import step_meter
from quire.engine.profiles import profile_path
from quire.engine.step_meter import KEPT_OF_A_SIZE, MIN_STEPS, StepMeter, StepTable, refit, without_interrupted

pytestmark = pytest.mark.cpu

SIZES = EngineSizes(500, 16, 192, 64, 8192, (None,), depth=2)


def true_seconds(shape, speed=1.0):
    return (2e-3 + 2e-4 * shape.tokens + 1e-7 * (shape.keys[0] + shape.pairs[0])) / speed


def plan_of(counts, start=100):
    starts = [start] * len(counts)
    return Plan(1, requests=[None] * len(counts), starts=starts, counts=counts, yields=[1] * len(counts))


def serve(meter, rng, num_steps, speed=1.0, batches=(1, 2, 5, 12, 40)):
    """Steps of several sizes; the device's clock says how long they took."""
    for _ in range(num_steps):
        batch = rng.choice(batches)
        counts = [1] * batch if rng.random() < 0.7 else [1] * (batch - 1) + [rng.choice([20, 100])]
        plan = plan_of(counts, rng.randrange(10, 500))
        seconds = true_seconds(step_meter.shape_of(plan, (None,)), speed) * rng.gauss(1, 0.02)
        meter.on_commit(plan, Sampled([], seconds=seconds), [], time.monotonic())
    meter.wait()


def test_costs_come_from_served_steps():
    meter = StepMeter("m", "here", SIZES, None)
    serve(meter, random.Random(1), MIN_STEPS - 1)
    assert meter.profile is None
    assert meter.recent_error is None
    assert meter.predict(plan_of([1])) is None
    serve(meter, random.Random(2), 1)
    assert meter.num_profiles == 1
    for shape in (decode_shape(3, 200, (None,)), prompt_shape(90, 0, (None,))):
        assert meter.profile.cost.seconds(shape) == pytest.approx(true_seconds(shape), rel=0.05)
    serve(meter, random.Random(3), 100)
    assert meter.recent_error < 0.05
    plan = plan_of([1, 1, 30])
    assert meter.predict(plan) == meter.profile.cost.seconds(step_meter.shape_of(plan, (None,)))
    assert meter.predict(replace(plan, drafts={0: Drafts([1])})) is None
    assert meter.predicted_s == pytest.approx(meter.measured_s, rel=0.05)


def test_a_machine_that_became_slower_is_noticed(tmp_path, monkeypatch):
    """Sizes that have not been served since follow the others. The file gets the new costs and the errors before."""
    monkeypatch.setattr(step_meter, "REFIT_S", 0.0)
    first = StepMeter("m", "here", SIZES, None)
    serve(first, random.Random(1), 2 * MIN_STEPS)
    path = tmp_path / "p.json"
    meter = StepMeter("m", "here", SIZES, first.profile, path)
    serve(meter, random.Random(4), MIN_STEPS, speed=0.5, batches=(1, 2))
    assert meter.num_profiles == 1
    saved = load_profile(path)
    assert saved.served_error == pytest.approx(0.5, abs=0.05)
    for shape in (decode_shape(2, 200, (None,)), decode_shape(40, 200, (None,))):
        assert saved.cost.seconds(shape) == pytest.approx(2 * true_seconds(shape), rel=0.15)


def test_a_calibration_has_the_sizes_of_this_engine_and_its_file_keeps_its_own(tmp_path, monkeypatch):
    """Plans and simulations read the file: a server of 4 requests is not to change theirs."""
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    monkeypatch.setattr(step_meter, "REFIT_S", 0.0)
    first = StepMeter("m", "here", SIZES, None)
    serve(first, random.Random(1), MIN_STEPS)
    small = replace(SIZES, max_requests=4, num_blocks=50)
    monkeypatch.setattr(step_meter, "find_calibration", lambda config, engine: first.profile)
    monkeypatch.setattr(step_meter, "read_sizes", lambda engine, target_s: small)
    engine = SimpleNamespace(scheduler=SimpleNamespace(pace=SimpleNamespace(target_s=None)))
    config = EngineConfig()
    meter = step_meter.make_meter(engine, config)
    assert (meter.profile.sizes, meter.num_profiles) == (small, 1)
    serve(meter, random.Random(2), MIN_STEPS)
    assert meter.num_profiles == 2
    assert meter.profile.sizes == small
    assert load_profile(profile_path(config)).sizes == SIZES


def test_steps_with_drafts_and_failures_are_no_measure():
    meter = StepMeter("m", "here", SIZES, None)
    drafted = replace(plan_of([3]), drafts={0: Drafts([1, 2])})
    meter.on_commit(drafted, Sampled([], seconds=1.0), [], 0.0)
    meter.on_commit(plan_of([1]), Sampled([], seconds=1.0, failed=[0]), [], 0.0)
    meter.on_commit(plan_of([1]), Sampled([], seconds=1.0, exited={0: 1}), [], 0.0)
    meter.on_commit(plan_of([1]), Sampled([]), [], 0.0)
    assert not meter._table.steps()


def test_without_overlap_a_step_includes_planning():
    meter = StepMeter("m", "here", replace(SIZES, depth=1), None)
    meter.on_commit(plan_of([1]), Sampled([], seconds=0.001), [], time.monotonic() - 5.0)
    (step,) = meter._table.steps()
    assert step.seconds >= 5.0


def test_the_table_is_bounded():
    table = StepTable()
    for number in range(10_000):
        table.add(StepShape(1 + number % 8, 1, (0.0,), (0.0,)), 1.0)
    assert len(table.steps()) == 4 * KEPT_OF_A_SIZE
    assert table.num_sizes == 4


def test_interrupted_steps_are_left_out():
    table = StepTable()
    for number in range(40):
        table.add(decode_shape(1, 100, (None,)), 0.5 if number == 7 else 0.01)
    assert len(without_interrupted(table.steps(), None)) == 39


def test_few_sizes_are_not_enough():
    table = StepTable()
    for _ in range(64):
        table.add(decode_shape(1, 100, (None,)), 0.01)
    assert refit(table, None, SIZES, "m", "here") is None


def test_a_file_that_cannot_be_written_is_given_up(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    meter = StepMeter("m", "here", SIZES, None, tmp_path / "file" / "p.json")
    serve(meter, random.Random(1), MIN_STEPS)
    assert meter.path is None
    assert meter.profile is not None
    assert "cannot be written" in caplog.text


def test_a_fit_that_fails_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(step_meter, "REFIT_S", 0.0)
    monkeypatch.setattr(step_meter, "refit", lambda *values: 1 / 0)
    meter = StepMeter("m", "here", SIZES, None)
    serve(meter, random.Random(1), 3 * MIN_STEPS)
    assert meter.profile is None
    assert [record.levelname for record in caplog.records] == ["ERROR"]
