"""`quire quantize` as a command: what it prints and writes, and how it fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.cli.main import main
from quire.quantize.text import BUILT_IN_TEXT
from tests.tools.tiny_models import tiny_text_gguf

pytestmark = pytest.mark.cpu

NAMES = ("--max-tokens", "1024", "--window", "64", "--report-tokens", "200")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text_gguf(tmp_path_factory.mktemp("source") / "tiny.gguf")


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "quire", "quantize", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def test_the_report_is_printed_and_written(source: Path, tmp_path: Path) -> None:
    done = run(source, "--to", "gguf:q4_0", "-o", tmp_path / "out", *NAMES, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert json.loads((tmp_path / "out/quality.json").read_text()) == document
    assert document["comparison"]["num_tokens"] > 150
    assert 0 < document["comparison"]["kl"]["mean"] < 0.02
    assert document["passed"]
    assert 4.5 <= document["bits_per_weight"] < 7  # the tied embedding has 8.5
    assert document["output_bytes"] < document["source_bytes"] / 4
    assert len(document["worst"]) == 5
    assert document["worst"][0]["error"] >= document["worst"][-1]["error"] > 0
    assert document["calibration_tokens"] == 1024
    assert document["predicted_tokens_per_s"] == pytest.approx(
        document["memory_bytes_per_s"] / document["bytes_per_token"]
    )


def test_a_kl_that_is_too_high_fails_and_keeps_the_model(source: Path, tmp_path: Path) -> None:
    done = run(source, "--to", "gguf:q4_0", "-o", tmp_path / "out", *NAMES, "--max-kl", "1e-9")
    assert done.returncode == 1
    assert "above 1e-09" in done.stderr
    assert "kept in" in done.stderr
    assert not json.loads((tmp_path / "out/quality.json").read_text())["passed"]
    assert (tmp_path / "out/model-q4_0.gguf").is_file()
    assert "KL(A||B)" in done.stdout


@pytest.mark.parametrize(
    ("to", "output", "more", "message"),
    [
        ("q9", "out", (), "one of"),
        ("fp8", "full", (), "exists"),
        ("fp8", "out", ("--no-report", "--max-kl", "0.1"), "Leave one of them out"),
        ("fp8", "out", ("--no-report", "--report-text", "text.txt"), "Leave one of them out"),
        ("fp8", "out", ("--report-text", "no-such-file.txt"), "cannot be read"),
        ("fp8", "out", ("--report-tokens", "1"), "at least 2"),
        ("fp8", "out", ("--max-kl", "nan"), "0 or more"),
        ("awq", "out", ("--max-tokens", "-5"), "max_tokens is -5"),
        ("fp8", "blocked", ("--no-report",), "cannot be written"),
    ],
)
def test_mistakes_are_told(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    to: str, output: str, more: tuple[str, ...], message: str,
) -> None:  # fmt: skip
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    (tmp_path / "blocked.partial").write_text("a file where a directory is to be")
    monkeypatch.setattr(
        sys, "argv", ["quire", "quantize", str(source), "--to", to, "-o", str(tmp_path / output), *more]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_ctrl_c_leaves_what_can_be_continued(source: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "quire", "quantize", str(source), "--to", "gptq", "-o", str(tmp_path / "out")]
    job = subprocess.Popen([*words, "--no-report"], stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "out.partial/job.json").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(job.pid, signal.SIGINT)
        _, said = job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode == 130
    assert "same command continues" in said
    assert not (tmp_path / "out").exists()


def test_the_text_that_comes_with_quire() -> None:
    assert 65_000 < BUILT_IN_TEXT.stat().st_size <= 65_536
    assert "\r" not in BUILT_IN_TEXT.read_text(encoding="utf-8")
