"""The examples run as they are printed, and are short enough to read."""

from __future__ import annotations

import ast
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.server.running import Running

pytestmark = pytest.mark.server

EXAMPLES = Path(__file__).parent.parent / "examples"
MAX_LINES = 30


@pytest.fixture(scope="module")
def server(default_model: Path) -> Iterator[Running]:
    with Running("--max-len", "2048", "--kv-memory", "1") as running:
        yield running


def run(name: str, *arguments: str, **environment: str) -> str:
    """An example in a process of its own; what it printed."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    settings = {**os.environ, **environment}
    child = subprocess.run(command, capture_output=True, text=True, timeout=300, env=settings, check=False)
    assert child.returncode == 0, child.stderr
    return child.stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_it_is_short_and_says_how_to_run_it(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    assert text.startswith('"""')
    assert f"{path.stem}" in text.split('"""')[1]


def test_there_are_five():
    assert len(list(EXAMPLES.glob("*.py"))) == 5


@pytest.mark.usefixtures("default_model")
def test_offline_batch():
    lines = run("offline_batch.py").splitlines()
    assert len(lines) == 6
    assert all(" -> " in line for line in lines)
    assert lines[0] != lines[1]


@pytest.mark.usefixtures("default_model")
def test_async_streaming():
    lines = run("async_streaming.py").splitlines()
    for name in ("one", "two"):
        pieces = [line.removeprefix(f"{name}: ") for line in lines if line.startswith(f"{name}: ")]
        (whole,) = (line.removeprefix(f"{name} is complete: ") for line in lines if line.startswith(f"{name} is"))
        assert len(pieces) > 2
        assert "".join(map(literal, pieces)) == literal(whole)


@pytest.mark.usefixtures("default_model")
def test_fastapi_app():
    app = runpy.run_path(str(EXAMPLES / "fastapi_app.py"))["app"]
    with TestClient(app) as client:
        growing = client.get("/continue", params={"text": "Once upon a", "max_tokens": 64}).text
    lines = growing.splitlines()
    assert len(lines) > 4  # updates that arrive while a line is sent are sent together
    assert all(after.startswith(before) for before, after in pairwise(lines))


def test_openai_client(server):
    out = run("openai_client.py", server.url)
    whole, _, streamed = out.rpartition("tokens)\n")
    assert whole.rpartition("\n(")[0].strip() == streamed.strip()
    assert streamed.strip()


def test_tool_calling(server):
    """With the server's address in the environment, for a change."""
    called, answer = run("tool_calling.py", QUIRE_URL=server.url).split("\n", 1)
    assert called.startswith("weather(")
    assert answer.strip()


def literal(text: str) -> str:
    value = ast.literal_eval(text)
    assert isinstance(value, str)
    return value
