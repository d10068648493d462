"""`quire train-draft` as a command: processes, Ctrl-C, what it prints, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.cli.train_draft import show
from tests.tools.chat_model import chat_model

pytestmark = pytest.mark.cpu

OPTIONS = ("--threads", "1", "--max-requests", "8", "--vocabulary", "64")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("model") / "chat.gguf")


def command(model: Path, out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "quire", "train-draft", str(model), "--out", str(out), *OPTIONS, *more]


def train(model: Path, out: Path, *more: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(model, out, *more), capture_output=True, text=True, timeout=300, env=os.environ | variables
    )


def test_json_is_one_document(model: Path, tmp_path: Path) -> None:
    done = train(model, tmp_path / "head", "--kind", "medusa", "--tokens", "200", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["kind"] == "medusa"
    assert len(document["acceptance"]) == 4
    assert document["engine"]["num_prompts"] > 0
    assert "of them held out" in done.stderr
    assert "training: 100% in" in done.stderr
    assert (tmp_path / "head" / "model.safetensors").exists()


def test_a_report_to_read(model: Path, tmp_path: Path) -> None:
    done = train(model, tmp_path / "head", "--kind", "block", "--tokens", "200", "--depth", "2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"block head for {model} in {tmp_path / 'head'}"
    assert any(line.startswith("tokens a step, the engine") for line in lines)
    assert any("pay" in line for line in lines)
    assert lines[-1] == f"Use it with --speculate block:{tmp_path / 'head'}"


def test_ctrl_c_leaves_what_resume_continues(model: Path, tmp_path: Path) -> None:
    head = tmp_path / "head"
    options = ("--kind", "block", "--tokens", "100000000")
    child = subprocess.Popen(command(model, head, *options), stderr=subprocess.PIPE, text=True)
    try:
        while not (head / "training" / "dialogues-00001.safetensors").exists():
            assert child.poll() is None
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        _, error = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 130
    assert error.splitlines()[-1] == "interrupted; the same command with --resume continues"
    done = train(model, head, *options, "--resume", "--minutes", "0.0001", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["answer_tokens"] > 500


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kind", "mlp"], "invalid choice: 'mlp'"),
        ([], "the following arguments are required: --kind"),
        (["--kind", "block", "--layer", "3"], "layer is for the kind exit"),
        (["--kind", "block", "--prompts", "/does/not/exist"], "cannot be read"),
        (["--kind", "block", "--resume"], "no run that could be resumed"),
    ],
)
def test_what_is_wrong_is_said(model: Path, tmp_path: Path, arguments: list[str], words: str) -> None:
    done = train(model, tmp_path / "head", *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize("name", ["torch", "safetensors"])
def test_without_its_packages_it_says_what_to_install(model: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError(\"No module named '{name}'\", name='{name}')")
    done = train(model, tmp_path / "head", "--kind", "block", PYTHONPATH=f"{tmp_path}{os.pathsep}{Path.cwd()}")
    assert done.returncode == 2
    assert f"Training needs {name}, and {name} is not installed" in done.stderr
    assert "pip install 'quire[torch]'" in done.stderr


def test_help_says_what_a_seed_fixes(model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "quire", "train-draft", "--help"], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0
    assert "bit for bit" in " ".join(done.stdout.split())


def test_where_the_engine_cannot_draft_nothing_is_claimed(capsys: pytest.CaptureFixture[str]) -> None:
    show(
        {
            "kind": "block",
            "model": "m",
            "directory": "d",
            "answer_tokens": 5,
            "held_out_tokens": 2,
            "acceptance": [0.5],
            "chain_tokens_per_step": [1.5],
        }
    )
    text = capsys.readouterr().out
    assert "speed was not measured" in text
    assert "pay" not in text
