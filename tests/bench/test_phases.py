"""`quire bench phases` and `quire simulate` on a tiny engine and on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.bench import phases
from quire.capacity.profile import EngineSizes, load_profile
from quire.capacity.step_cost import StepShape
from quire.cli.main import main
from quire.config import EngineConfig
from quire.engine.profiles import profile_path

pytestmark = pytest.mark.model

SMALL = ("--max-len", "256", "--kv-memory", "0.1", "--max-requests", "4", "--max-tokens-per-step", "32")


def run(*arguments: object, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("phases") / "p.json"
    page = path.with_suffix(".html")
    done = run("bench", "phases", *SMALL, "--repeats", 1, "--save", "--profile", path, "--html", page)
    assert done.returncode == 0, done.stderr
    assert f"Saved to {path}" in done.stderr
    assert "Memory is read at" in done.stdout
    assert "Roofline" in page.read_text()
    return path


def test_scenarios_fit_the_engine():
    sizes = EngineSizes(100, 16, 32, 4, 200, (None,))
    scenarios = list(phases.choose_scenarios(sizes))
    assert {scenario.batch for scenario in scenarios} == {1, 2, 3, 4}
    for scenario in scenarios:
        length = scenario.prompt_tokens + scenario.output_tokens(sizes)
        assert length <= 200
        assert scenario.batch * -(-length // 16) <= 100


def test_a_measured_engine_is_saved_and_simulated(profile):
    saved = load_profile(profile)
    assert saved.sizes.max_requests == 4
    assert saved.sizes.max_tokens_per_step == 32
    assert saved.sizes.itl_target_s == 0.05  # a server's on a CPU; it did not disturb the measurement
    assert saved.cost.coefficients[0] >= 0
    done = run("simulate", "--profile", profile, "--rate", 50, "--num-requests", 30, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["summary"]["num_ok"] == 30
    assert document["summary"]["output_tokens"] == 30 * 64
    assert document["engine"]["steps"] > 64
    text = run("simulate", "--profile", profile, "--rate", 50, "--num-requests", 10, "--ranges").stdout
    assert "TTFT" in text
    assert "ttft_ms p99" in text


def test_a_profile_is_found_without_its_name(profile, tmp_path):
    """Options of the scheduler do not change which profile it is; it is refused on another machine."""
    target = profile_path(EngineConfig())
    kept = tmp_path / "quire" / "capacity" / target.name
    kept.parent.mkdir(parents=True)
    kept.write_bytes(profile.read_bytes())
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("QUIRE_CACHE", None)
    more = ("--rate", 50, "--num-requests", 9, "--max-len", 255, "--batching", "static", "--batch-size", 4)
    done = run("simulate", *more, environment=environment)
    assert done.returncode == 0, done.stderr
    kept.write_text(kept.read_text().replace(load_profile(profile).machine, "Another CPU, 99 threads"))
    done = run("simulate", *more, environment=environment)
    assert done.returncode == 2
    assert "measured on Another CPU" in done.stderr


def test_an_engine_with_room_for_nothing(tmp_path):
    done = run("bench", "phases", "--max-len", 18, "--max-requests", 1, "--kv-memory", 0.1)
    assert done.returncode == 2
    assert "a fit needs" in done.stderr


def test_a_file_is_named_only_where_it_is_written(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["quire", "bench", "phases", "--profile", "x.json"])
    with pytest.raises(SystemExit):
        main()
    assert "add --save" in capsys.readouterr().err


def test_steps_without_prompts_do_not_count_as_prefill():
    """Two chunks of prompts, one step of both rows, and one in which the other row has ended."""
    shapes = [StepShape(16, 0, (0.0,), (9.0,)), StepShape(9, 2, (1.0,), (9.0,)), StepShape(2, 2, (9.0,), (0.0,))]
    shapes.append(StepShape(1, 1, (9.0,), (0.0,)))
    steps = [phases.MeasuredStep(shape, 0.1) for shape in shapes]
    result = phases.summarize(phases.Scenario(2, 12), steps)
    assert result.prefill_s == pytest.approx(0.2)
    assert result.decode_s == pytest.approx(0.1)


def test_where_a_profile_is_kept_depends_on_what_decides_costs():
    base = EngineConfig()
    scheduling = EngineConfig(max_requests=3, seed=1, max_len=99, batching="static", batch_size=4, itl_target_ms=9)
    assert profile_path(base) == profile_path(scheduling)
    assert profile_path(base) != profile_path(EngineConfig(kv_dtype="int8"))
    assert profile_path(base).suffix == ".json"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((), "--trace FILE, or --rate"),
        (("--rate", 1, "--trace", "x"), "--trace FILE, or --rate"),
        (("--rate", 0), "--rate is 0.0"),
        (("--rate", 1, "--compare", "http://x"), "--compare replays a trace"),
        (("--rate", 1, "--profile", "none.json"), "quire bench phases"),
        (("--trace", "none.csv", "--profile", "PROFILE"), "cannot be read"),
        (("--rate", 1, "--profile", "PROFILE", "--max-requests", 99), "below max_requests"),
        (("--rate", 1, "--profile", "PROFILE", "--max-len", 257), "max_len is 257"),
        (("--rate", 1, "--profile", "PROFILE", "--kv-dtype", "int8"), "kv_dtype is part of"),
        (("--rate", 1, "--profile", "PROFILE", "gemma3:270m"), "--profile is of smollm2:135m"),
        (("--rate", 1, "--trace-speed", 2), "--trace-speed needs --trace"),
        (("--trace", "x.csv", "--prompt-tokens", 2), "--prompt-tokens needs --rate"),
    ],
)
def test_wrong_arguments(monkeypatch, capsys, profile, arguments, part):
    given = (str(profile if argument == "PROFILE" else argument) for argument in arguments)
    monkeypatch.setattr(sys, "argv", ["quire", "simulate", *given])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 2
    assert part in capsys.readouterr().err
