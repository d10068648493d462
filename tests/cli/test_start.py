"""What commands load before they do anything: the time until `quire --help` or the first token depends on it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from quire.cli.main import COMMANDS, make_parser
from tests.tools.tiny_models import tiny_text_gguf

pytestmark = pytest.mark.cpu

HEAVY = (
    "torch",
    "numpy",
    "tokenizers",
    "jinja2",
    "rich",
    "starlette",
    "pydantic",
    "llguidance",
    "asyncio",
    "safetensors",
)
SCRIPT = """
import sys
from quire.cli.main import main
heavy, sys.argv[1:] = sys.argv[1].split(), sys.argv[2:]
try:
    main()
except SystemExit as exit:
    assert exit.code in (None, 0), exit.code
print("loaded:", *(name for name in heavy if name in sys.modules), file=sys.stderr)
"""


def run(*arguments: str, heavy: tuple[str, ...] = HEAVY) -> str:
    command = [sys.executable, "-c", SCRIPT, " ".join(heavy), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["models"], ["info"], ["generate", "--help"]])
def test_commands_without_a_model_load_nothing_heavy(arguments):
    assert run(*arguments) == "loaded:\n"


# What an answer of a plain model needs nothing of.
DEFERRED = (
    "torch", "jinja2", "rich", "pydantic", "llguidance", "asyncio", "safetensors", "huggingface_hub", "tqdm",
    "quire.engine.draft_heads", "quire.engine.draft_model", "quire.engine.eagle", "quire.engine.early_exit",
    "quire.engine.self_speculation", "quire.engine.split_steps", "quire.kernels.cpu.split", "quire.quantize",
    "quire.train", "quire.weights.heads", "quire.weights.json_config", "quire.weights.mtp",
    "quire.weights.safetensors_checkpoint", "quire.weights.schemes",
)  # fmt: skip


def test_an_answer_loads_only_what_it_needs(tmp_path):
    model = str(tiny_text_gguf(tmp_path / "model.gguf"))
    options = ("-p", "hello", "--max-tokens", "3", "--kernels", "native")
    assert run("generate", model, *options, heavy=DEFERRED).splitlines()[-1] == "loaded:"


def test_the_check_sees_what_is_loaded():
    assert run("models", heavy=("torch", "argparse", "json")) == "loaded: argparse json\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_parses_and_describes_itself(name, capsys):
    assert import_module(f"quire.cli.{name.replace('-', '_')}").run.__doc__ == COMMANDS[name]
    with pytest.raises(SystemExit, match="0"):
        make_parser([name]).parse_args([name, "--help"])
    assert COMMANDS[name] in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("variables", [{}, {"OPENBLAS_NUM_THREADS": "2"}])
def test_numpy_starts_no_threads_and_the_variable_is_as_before(variables):
    script = """
import os
from quire.cli.imports import import_numpy
before = dict(os.environ)
import_numpy()
assert os.environ == before
import numpy
print(len(os.listdir("/proc/self/task")))
"""
    without = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=without | variables)
    most = min(int(variables.get("OPENBLAS_NUM_THREADS", 1)), os.cpu_count() or 1)
    assert int(done.stdout) == most


def generate(tmp_path: Path, redirection: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A short answer of a tiny model, in a shell that redirects the command's output."""
    model = tiny_text_gguf(tmp_path / "model.gguf")
    command = f"{sys.executable} -m quire generate {model} -p hello --temperature 0 --max-tokens 5 {redirection}"
    environment = {**os.environ, **environment}
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_an_answer_does_not_depend_on_stderr(tmp_path, redirection):
    plain, other = generate(tmp_path, ""), generate(tmp_path, redirection)
    assert other.returncode == 0
    assert plain.stdout.strip()
    assert other.stdout == plain.stdout


@pytest.mark.parametrize("option", ["", "--json"])
def test_an_answer_that_cannot_be_written(tmp_path, option):
    done = generate(tmp_path, f"{option} >/dev/full")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: the output cannot be written: No space left on device"


def test_characters_that_the_terminal_lacks(tmp_path):
    done = generate(tmp_path, "", PYTHONIOENCODING="ascii", LC_ALL="C")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


def test_less_address_space_than_the_cache_takes(tmp_path):
    model = tiny_text_gguf(tmp_path / "model.gguf")
    options = "-p hello --max-tokens 4 --num-blocks 1000000"
    command = f"ulimit -v 3000000; {sys.executable} -m quire generate {model} {options}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "Lower kv_memory" in done.stderr.splitlines()[-1]
