"""`quire bench phases` and `quire simulate` on a tiny engine and on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire.bench import phases
from quire.capacity.profile import EngineSizes, load_profile
from quire.config import EngineConfig

pytestmark = pytest.mark.model

SMALL = ("--max-len", "256", "--kv-memory", "0.1", "--max-requests", "4", "--max-tokens-per-step", "32")


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("phases") / "p.json"
    done = run("bench", "phases", *SMALL, "--repeats", 1, "--save", "--profile", path)
    assert done.returncode == 0, done.stderr
    assert f"Saved to {path}" in done.stdout
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


def test_where_a_profile_is_kept_depends_on_what_decides_costs():
    base = EngineConfig()
    assert phases.profile_path(base) == phases.profile_path(EngineConfig(max_requests=3, seed=1))
    assert phases.profile_path(base) != phases.profile_path(EngineConfig(kv_dtype="int8"))
    assert phases.profile_path(base).suffix == ".json"


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
    ],
)
def test_wrong_arguments(profile, arguments, part):
    done = run("simulate", *(profile if argument == "PROFILE" else argument for argument in arguments))
    assert done.returncode == 2
    assert part in done.stderr
    assert "Traceback" not in done.stderr
