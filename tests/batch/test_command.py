"""`quire batch` as a user runs it, with the default model: killed, interrupted and resumed, and given wrong input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from tests.server.running import children, wait_for

pytestmark = pytest.mark.server

SMALL = ("--max-len", "512", "--kv-memory", "0.25", "--max-requests", "4")
SCHEMA = {"type": "object", "properties": {"colour": {"type": "string", "maxLength": 8}}, "required": ["colour"]}
NUM_ROWS = 48


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "quire.cli.main", "batch", *map(str, arguments), *SMALL]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=120, check=False)


def bodies():
    for index in range(NUM_ROWS):
        prompt = f"{'The sun is warm. ' * (index % 5)}Row {index}:"
        chat = {"messages": [{"role": "user", "content": f"Name colour {index}."}], "max_tokens": 16}
        yield [
            {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "logprobs": 1},
            {"prompt": prompt, "max_tokens": 16, "n": 3, "temperature": 1.0},
            {"custom_id": f"chat {index}", "url": "/v1/chat/completions", "body": chat},
            {**chat, "response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA}}},
        ][index % 4]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("batch") / "in.jsonl"
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies()))
    return path


@pytest.fixture(scope="module")
def expected(rows: Path) -> bytes:
    """The output of a job that nothing disturbs."""
    done = run(rows, rows.with_name("whole.jsonl"), "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["num_rows"], report["num_errors"], report["num_resumed"]) == (NUM_ROWS, 0, 0)
    assert report["completion_tokens"] > 0
    assert f"{NUM_ROWS} rows" in done.stderr
    output = rows.with_name("whole.jsonl").read_bytes()
    assert [json.loads(line)["response"]["status_code"] for line in output.splitlines()] == [200] * NUM_ROWS
    return output


def engine_of(pid: int) -> int | None:
    for child in children(pid):
        if "quire.engine.process" in Path(f"/proc/{child}/cmdline").read_text().split("\0"):
            return child
    return None


def test_kills_do_not_change_a_byte(rows, expected):
    """The engine is killed once, then the job itself, then the job is interrupted; the last run ends undisturbed."""
    output = rows.with_name("killed.jsonl")
    index = rows.with_name("killed.jsonl.ledger") / "index"
    one_by_one = ("--max-requests", "1")  # the job must still run when its first answers are on the disk
    for number in (signal.SIGKILL, signal.SIGINT):
        before = index.stat().st_size if index.exists() else 0
        job = subprocess.Popen([*command(rows, output, "--resume"), *one_by_one], stderr=subprocess.PIPE, text=True)
        wait_for(lambda before=before: index.exists() and index.stat().st_size > before, 60)
        if number == signal.SIGKILL:
            engine = engine_of(job.pid)
            assert engine is not None
            os.kill(engine, signal.SIGKILL)
            wait_for(lambda was=engine, pid=job.pid: engine_of(pid) not in (None, was), 60)
        job.send_signal(number)
        _, errors = job.communicate(timeout=60)
        assert job.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 130), errors
        assert not output.exists()
        if number == signal.SIGINT:
            assert "--resume" in errors
            assert "Traceback" not in errors
    done = run(rows, output, "--resume", "--json")
    assert done.returncode == 0, done.stderr
    assert 0 < json.loads(done.stdout)["num_resumed"] < NUM_ROWS
    assert output.read_bytes() == expected
    assert not index.parent.exists()


def test_batches_and_their_size_do_not_change_a_byte(rows, expected):
    output = rows.with_name("other.jsonl")
    assert run(rows, output, "--max-requests", "13", "--max-tokens-per-step", "40", "--no-prefix-cache").returncode == 0
    assert output.read_bytes() == expected


def test_replicas_do_not_change_a_byte(rows, expected):
    output = rows.with_name("replicas.jsonl")
    assert run(rows, output, "--replicas", "2").returncode == 0
    assert output.read_bytes() == expected


def test_two_jobs_with_one_output(rows):
    output = rows.with_name("both.jsonl")
    with subprocess.Popen(command(rows, output), stderr=subprocess.DEVNULL) as job:
        wait_for(lambda: (rows.with_name("both.jsonl.ledger") / "lock").exists(), 60)
        second = run(rows, output, "--resume")
        job.send_signal(signal.SIGINT)
    assert second.returncode == 2
    assert "another process runs this job" in second.stderr


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("none.jsonl", "out.jsonl"), "cannot be read"),
        (("in.jsonl", "nowhere/out.jsonl"), "not a directory"),
        (("in.jsonl", "whole.jsonl"), "exists already"),
        (("in.jsonl", "out.jsonl", "--temperature", "-1"), "temperature"),
        (("in.jsonl", "out.jsonl", "--replicas", "0"), "replicas is 0"),
    ],
)
def test_wrong_arguments(rows, expected, arguments, part):
    source, target, *more = arguments
    done = run(rows.with_name(source), rows.parent / target, *more)
    assert done.returncode == 2
    assert part in done.stderr
    assert "Traceback" not in done.stderr


def test_parquet(rows, expected, tmp_path):
    table = [
        {"id": f"row {index}", "prompt": f"Count: {index},", "messages": None, "max_tokens": 4} for index in range(5)
    ]
    table.append({"id": "chat", "messages": json.dumps([{"role": "user", "content": "Hi"}]), "max_tokens": 4})
    table.append({"id": "chat", "prompt": "again"})
    parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "in.parquet")
    done = run(tmp_path / "in.parquet", tmp_path / "out.parquet")
    assert done.returncode == 0, done.stderr
    answers = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [one["custom_id"] for one in answers] == [row["id"] for row in table]
    assert [one["status_code"] for one in answers] == [200] * 6 + [400]
    assert all(one["text"] for one in answers[:6])
    assert answers[6]["text"] is None
    assert json.loads(answers[0]["response"])["object"] == "text_completion"


def test_an_empty_file(tmp_path):
    (tmp_path / "in.jsonl").write_text("\n")
    assert run(tmp_path / "in.jsonl", tmp_path / "out.jsonl").returncode == 0
    assert (tmp_path / "out.jsonl").read_bytes() == b""
