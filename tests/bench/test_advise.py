"""Advice: which options it tries, what it promises, and what it does not know."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from quire.bench import advise as advising
from quire.bench.advise import Knob, advise, flags, gains, list_knobs
from quire.bench.serve.traces import TraceRequest
from quire.bench.simulate import arrivals
from quire.capacity.simulator import Simulation
from quire.config import EngineConfig
from quire.engine.profiles import profile_path
from tests.capacity.test_simulator import PROFILE, SIZES
from tests.tools.tiny_models import tiny_directory

pytestmark = pytest.mark.cpu


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    return tiny_directory(tmp_path / "model")


def recorded(count=80, rate=1.5):
    rng, at_s, entries = random.Random(3), 0.0, []
    for _ in range(count):
        entries.append(TraceRequest(at_s, rng.randrange(4, 60), rng.randrange(1, 30)))
        at_s += rng.expovariate(rate)
    return entries


def run(model, **options):
    config = EngineConfig(model=str(model), device="cpu")
    profile = replace(PROFILE, model=str(model))
    document = advise(config, profile, recorded(), model_path=Path(model), **options)
    return {each.option: each for each in document["advice"]}, document


def test_what_is_promised_is_what_a_simulation_with_the_option_gives(model):
    found, document = run(model)
    advice = found["--max-requests 2"]
    changed = replace(PROFILE, sizes=replace(SIZES, max_requests=2))
    base, other = (Simulation(profile).run(arrivals(recorded())) for profile in (PROFILE, changed))
    means = [sum(each.times[-1] - each.arrival_s for each in requests) / len(requests) for requests in (base, other)]
    assert advice.gains["e2e"] == pytest.approx(1 - means[1] / means[0])
    assert document["base"]["num_ok"] == 80
    assert found["--prefix-cache" if "--prefix-cache" in found else "--no-prefix-cache"].gains["e2e"] == 0


def test_costs_that_are_not_measured_are_not_known(model, monkeypatch):
    monkeypatch.setattr(advising, "usable_cores", lambda: 2)
    found, _ = run(model)
    for option in ("--kv-dtype int8", "--quantize int4", "--tensor-parallel 2", "--replicas 2", "--speculate suffix"):
        assert found[option].gains is None
        assert "quire bench" in found[option].note
    with_chance, _ = run(model, acceptance=0.9)
    assert with_chance["--speculate suffix"].gains["tpot"] > 0


def test_a_measured_option_is_simulated_with_its_own_costs(model, monkeypatch):
    """A cache of int8 that halves the time of every step."""
    config = EngineConfig(model=str(model), device="cpu", kv_dtype="int8")
    cost = PROFILE.cost
    faster = replace(cost, coefficients=tuple(each / 2 for each in cost.coefficients))
    monkeypatch.setattr("quire.bench.profiles.describe_machine", lambda config: PROFILE.machine)
    replace(PROFILE, model=str(model), cost=faster).save(profile_path(config))
    found, _ = run(model)
    assert found["--kv-dtype int8"].gains["tpot"] > 0.4
    assert found["--kv-dtype int8"].command == f"quire serve {model} --device cpu --kv-dtype int8"


def test_measuring_measures_what_is_missing(model, monkeypatch):
    measured = []

    def measure(config, path, repeats):
        measured.append(config.kv_dtype)
        return replace(PROFILE, model=config.model), {}

    monkeypatch.setattr(advising, "measure_phases", measure)
    monkeypatch.setattr("quire.bench.profiles.describe_machine", lambda config: PROFILE.machine)
    found, _ = run(model, measures=True)
    assert {"int8", "fp8"} <= set(measured)
    assert found["--kv-dtype int8"].gains["e2e"] == 0
    again, _ = run(model, measures=True)
    assert len(measured) == len(set(flags_of(again)))


COST_FLAGS = ("--kv-dtype", "--quantize", "--block-size", "--tensor-parallel")


def flags_of(found):
    return [option for option in found if option.split()[0] in COST_FLAGS]


def test_a_quantized_model_is_not_to_be_rounded_again():
    config = EngineConfig(model="smollm2:135m")
    options = [knob.changed[0] for knob in list_knobs(config, PROFILE)]
    assert "quantize" in options
    assert not any(knob.config == config for knob in list_knobs(config, PROFILE))


def test_commands_name_every_option_that_is_not_the_default():
    config = EngineConfig(model="m", tensor_parallel_size=2)
    assert flags(config) == ["--tensor-parallel 2"]
    config = EngineConfig(model="m", prefix_cache=False, itl_target_ms=25.0, max_requests=4)
    assert flags(config) == ["--max-requests 4", "--no-prefix-cache", "--itl-target-ms 25"]
    assert Knob(config, ()).command() == "quire serve m --max-requests 4 --no-prefix-cache --itl-target-ms 25"


def test_an_option_that_refuses_requests_is_no_gain():
    summary = {"e2e_ms": {"mean": 10.0}, "ttft_ms": {"mean": 1.0}, "tpot_ms": None, "output_tokens_per_s": 5.0}
    base = {**summary, "num_ok": 5}
    assert gains(base, {**summary, "e2e_ms": {"mean": 5.0}, "num_ok": 5})["e2e"] == 0.5
    assert set(gains(base, {**summary, "e2e_ms": {"mean": 5.0}, "num_ok": 4}).values()) == {-1.0}
