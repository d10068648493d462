"""`quire bench serve` as a person or a script meets it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from tests.bench.fake_server import EVENT_STREAM, Call, FakeServer, chunk, piece, whole_answer

pytestmark = pytest.mark.cpu

COMMAND = [sys.executable, "-m", "quire.cli.main", "bench", "serve"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "200"}
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, env=environment)


def test_json_is_one_document_and_nothing_else():
    with FakeServer() as server:
        done = bench("--base-url", server.url, "--num-requests", "5", "--rate", "inf", "--slo", "ttft:60000", "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    stamp = {"bench", "quire", "time", "command"}
    assert {"url", "model", "settings", "load", "interrupted", "summary", "errors", "client"} | stamp == set(document)
    assert document["summary"]["goodput"]["num_met"] == 5
    assert document["settings"]["seed"] is not None
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "send_delay_ms"):
        assert set(document["summary"][name]) == {"mean", "p50", "p90", "p99", "max"}


def test_rows_for_every_request():
    with FakeServer() as server:
        done = bench("--base-url", f"{server.url}/v1/", "--num-requests", "5", "--concurrency", "2", "--json-requests")
    rows = json.loads(done.stdout)["requests"]
    assert [row["number"] for row in rows] == list(range(5))
    assert all(len(row["itl_ms"]) == 63 for row in rows)


def test_a_table_for_people():
    with FakeServer() as server:
        done = bench("--base-url", server.url, "--num-requests", "5", "--concurrency", "2", "--seed", "7")
    assert done.returncode == 0
    for words in ("fake-model at http://127.0.0.1", "2 at a time; 115 words in, 64 tokens out; seed 7", "TTFT", "p99"):
        assert words in done.stdout
    assert "5 answered, 0 failed" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ([], 2, "--base-url URL, or --spawn"),
        (["--base-url", "http://127.0.0.1:1"], 1, "Is the server running?"),
        (["--base-url", "http://h", "--trace", "/does/not/exist"], 2, "cannot be read"),
        (["--base-url", "nonsense"], 2, "http://127.0.0.1:8000"),
        (["--base-url", "http://h", "--rate", "2", "--concurrency", "3"], 2, "do not go together"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_is_wrong_is_said_in_one_line(arguments, status, words):
    done = bench(*arguments)
    assert done.returncode == status
    assert done.stdout == ""
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_help_names_the_flags():
    done = bench("--help")
    assert done.returncode == 0
    assert "--burstiness" in done.stdout


def test_an_interrupt_ends_with_what_was_measured():
    """Three are answered, the fourth never is; Ctrl-C comes when it has begun."""
    process: subprocess.Popen[str] | None = None

    async def answer(call: Call) -> AsyncIterator[bytes]:
        if call.number < 3:
            async for data in whole_answer(call):
                yield data
            return
        yield EVENT_STREAM + chunk(piece(call, "a"))
        assert process is not None
        process.send_signal(signal.SIGINT)
        await asyncio.sleep(30)

    with FakeServer(answer) as server:
        arguments = ["--base-url", server.url, "--concurrency", "1", "--warmup", "0", "--json"]
        process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "")
    document = json.loads(output)
    assert document["interrupted"]
    summary = document["summary"]
    assert (summary["num_ok"], summary["num_unfinished"], summary["num_failed"]) == (3, 1, 0)
