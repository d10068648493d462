"""The wheel: built here, installed into an empty environment, it answers a prompt without torch. `make test-wheel` runs
this, because all instruction sets are compiled and what quire needs is downloaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_MB = 150  # of what `pip install quire` installs, the model not included; numpy takes 72

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif("QUIRE_TEST_WHEEL" not in os.environ, reason="it takes minutes; run it by make test-wheel"),
]


def run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def size_mb(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel and what it needs."""
    (wheel,) = (ROOT / "dist").glob("quire-*.whl")
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "venv", folder)
    pip = [folder / "bin/python", "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "uninstall", "-qq", "-y", "setuptools")
    before = size_mb(folder)
    run(*pip, "install", "-qq", "-c", ROOT / "constraints.txt", wheel)
    installed = size_mb(folder) - before
    print(f"installed: {installed:.0f} MB")
    assert installed <= MAX_MB
    return folder / "bin/python"


def test_it_has_all_instruction_sets_and_no_torch(python: Path) -> None:
    """Tiles must be requested from the system, so `built` names amx only where it can be used."""
    script = "import quire.kernels.cpu._native as n, importlib.util as u; print(*n.built(), u.find_spec('torch'))"
    found = [name for name in run(python, "-c", script).split() if name != "amx"]
    assert found == ["avx2", "avxvnni", "avx512", "None"]


def test_it_answers_a_prompt(python: Path, default_model: Path) -> None:
    command = (python.with_name("quire"), "generate", default_model, "-p", "The capital of France is", "--json")
    answer = json.loads(run(*command, "--max-tokens", "5", "--temperature", "0"))
    assert "Paris" in answer["outputs"][0]["outputs"][0]["text"]


def test_it_has_the_console_s_files(python: Path) -> None:
    names = run(python, "-c", "from quire.server.console.page import load_files; print(*load_files())").split()
    assert names == sorted(path.name for path in (ROOT / "quire/server/console/static").iterdir())
