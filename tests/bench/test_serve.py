"""Whole measurements against a server whose every byte is known."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from quire.bench.serve import server_process
from quire.bench.serve.report import format_report
from quire.bench.serve.run import run
from quire.bench.serve.server_process import spawn
from quire.bench.serve.settings import Settings
from quire.errors import EngineError
from tests.bench.fake_server import (
    END,
    EVENT_STREAM,
    Call,
    FakeServer,
    chunk,
    event,
    piece,
    refuse,
    usage,
    whole_answer,
)

pytestmark = pytest.mark.cpu

FAKE = str(Path(__file__).with_name("fake_server.py"))


def measure(server: FakeServer, **more: Any) -> dict[str, Any]:
    """A small run against a server; what it printed would have to survive JSON."""
    given = {"seed": 5, "base_url": server.url, "num_requests": 6, "output_tokens": 4, "warmup": 0, "timeout": 20.0}
    settings = Settings(**{**given, **more})
    document = run(settings, lambda done, total: None, with_requests=True)
    format_report(document)
    return json.loads(json.dumps(document, allow_nan=False))


class TestRequests:
    def test_completions(self):
        with FakeServer() as server:
            document = measure(server, prompt_words=12, concurrency=2, api_key="secret")
        summary = document["summary"]
        assert (summary["num_ok"], summary["num_failed"], summary["num_short"]) == (6, 0, 0)
        assert (summary["prompt_tokens"], summary["output_tokens"]) == (6 * 27, 6 * 4)
        assert summary["output_tokens_counted_by"] == {"usage": 6}
        assert document["model"] == "fake-model"
        assert document["client"]["num_chunks"] == 6 * 5
        for call in server.calls:
            assert call.path == "/v1/completions"
            assert call.headers["authorization"] == "Bearer secret"
            assert len(call.body.pop("prompt").split()) == 12
            assert call.body == {
                "model": "fake-model", "max_tokens": 4, "temperature": 0.0, "stream": True,
                "stream_options": {"include_usage": True}, "ignore_eos": True,
            }  # fmt: skip
        assert "secret" not in json.dumps(document)

    def test_chat_without_extra_fields(self):
        with FakeServer() as server:
            document = measure(server, chat=True, extra_fields=False, model="given", temperature=0.5)
        assert document["summary"]["num_ok"] == 6
        assert all(len(row["itl_ms"]) == 3 for row in document["requests"]), "the role's chunk is no token"
        for call in server.calls:
            assert call.path == "/v1/chat/completions"
            assert set(call.body) == {"model", "messages", "max_tokens", "temperature", "stream", "stream_options"}
            assert call.body["model"] == "given"

    def test_token_ids(self):
        with FakeServer() as server:
            document = measure(server, prompt_tokens=33)
        assert document["summary"]["prompt_tokens"] == 6 * 33
        assert all(len(call.prompt) == 33 for call in server.calls)

    def test_prompts_are_unlike_and_follow_the_seed(self):
        with FakeServer() as server:
            for seed in (1, 1, 2):
                measure(server, seed=seed, warmup=2, concurrency=1)
        first, again, other = ([call.prompt for call in server.calls[start : start + 8]] for start in (0, 8, 16))
        assert first == again
        assert len({" ".join(prompt.split()[:4]) for prompt in first + other}) == 16

    def test_connections_are_used_again(self):
        with FakeServer() as server:
            measure(server, concurrency=2, num_requests=20, model="m")
        assert server.num_connections == 2
        assert server.most_open == 2

    def test_a_server_that_counts_no_tokens(self):
        async def answer(call: Call) -> AsyncIterator[bytes]:
            yield EVENT_STREAM + chunk(piece(call, "a") + piece(call, "b")) + chunk(piece(call, "", "stop")) + END

        with FakeServer(answer) as server:
            document = measure(server)
        summary = document["summary"]
        assert summary["output_tokens_counted_by"] == {"chunks": 6}
        assert (summary["output_tokens"], summary["num_short"]) == (12, 6)
        assert "every chunk with text counts as one" in format_report(document)


class TestLoads:
    @pytest.mark.parametrize("load", [{"rate": float("inf")}, {"rate": 500.0, "burstiness": 0.5}], ids=["inf", "rate"])
    def test_an_open_loop_sends_while_nothing_has_been_answered(self, load):
        begun = []

        async def answer(call: Call) -> AsyncIterator[bytes]:
            begun.append(call)
            while len(begun) < 6:
                await asyncio.sleep(0.001)
            async for data in whole_answer(call):
                yield data

        with FakeServer(answer) as server:
            document = measure(server, **load)
        assert document["summary"]["num_ok"] == 6
        assert document["summary"]["peak_concurrency"] == 6
        assert document["summary"]["send_delay_ms"]["max"] >= 0

    def test_a_kept_connection_that_the_server_ends_is_no_failure(self):
        with FakeServer(hangs_up=True) as server:
            document = measure(server, concurrency=1, num_requests=4)
        assert document["summary"]["num_ok"] == 4
        assert not document["errors"]

    def test_a_trace_with_shared_beginnings(self, tmp_path):
        rows = [(0, 1100, 3, [0, 1, 2]), (500, 1400, 500, [0, 1, 5]), (700, 9000, 2, [0] * 18), (1000, 700, 2, [0, 8])]
        names = ("timestamp", "input_length", "output_length", "hash_ids")
        path = tmp_path / "trace.jsonl"
        path.write_text("\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows))
        with FakeServer() as server:
            document = measure(
                server, trace=path, trace_speed=10.0, num_requests=None, output_tokens=None,
                max_prompt_tokens=2000, max_output_tokens=50,
            )  # fmt: skip
        *probes, first, second, third = server.calls
        assert [len(call.prompt.split()) for call in probes] == [50, 550]
        assert [
            abs(row["prompt_tokens"] - wanted) <= 1
            for row, wanted in zip(document["requests"], (1100, 1400, 700), strict=True)
        ] == [True] * 3
        assert [call.body["max_tokens"] for call in (first, second, third)] == [3, 50, 2]
        shared = 2 * 512 // 2
        assert first.prompt.split()[:shared] == second.prompt.split()[:shared]
        assert first.prompt.split()[shared : shared + 5] != second.prompt.split()[shared : shared + 5]
        assert document["trace"] == {
            "num_read": 4, "num_replayed": 3, "num_skipped_prompt_too_long": 1, "num_skipped_without_answer": 0,
            "num_answers_shortened": 1, "tokens_per_word": 2.0,
        }  # fmt: skip

    def test_a_trace_in_ids_needs_no_probing(self, tmp_path):
        path = tmp_path / "trace.csv"
        path.write_text(
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.1,374,4\n2023-11-16 18:15:46.2,20,5\n"
        )
        with FakeServer() as server:
            document = measure(server, trace=path, trace_ids=True, concurrency=1, num_requests=None, output_tokens=None)
        assert [row["prompt_tokens"] for row in document["requests"]] == [374, 20]
        assert [call.num_prompt_tokens for call in server.calls] == [374, 20]

    def test_a_trace_in_words_needs_counts(self, tmp_path):
        async def answer(call: Call) -> AsyncIterator[bytes]:
            yield EVENT_STREAM + chunk(piece(call, "a", "stop")) + END

        path = tmp_path / "trace.csv"
        path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.1,374,4\n")
        given = {"trace": path, "num_requests": None, "output_tokens": None}
        with FakeServer(answer) as server:
            with pytest.raises(EngineError, match="--tokens-per-word"):
                measure(server, **given)
            measure(server, **given, tokens_per_word=1.5)
        assert len(server.calls[-1].prompt.split()) == round(374 / 1.5)


async def reset(call: Call) -> AsyncIterator[bytes]:
    yield b""


async def cut_in_a_chunk(call: Call) -> AsyncIterator[bytes]:
    yield EVENT_STREAM + chunk(piece(call, "a")) + b"50\r\ndata: {"


async def ends_too_early(call: Call) -> AsyncIterator[bytes]:
    yield EVENT_STREAM + chunk(piece(call, "a")) + b"0\r\n\r\n"


async def no_json(call: Call) -> AsyncIterator[bytes]:
    yield EVENT_STREAM + chunk(piece(call, "a")) + chunk(b"data: {oops\n\n")
    await asyncio.sleep(30)


async def wrong_types(call: Call) -> AsyncIterator[bytes]:
    yield EVENT_STREAM + chunk(event({"choices": "none"})) + END


async def no_stream(call: Call) -> AsyncIterator[bytes]:
    body = b'{"choices": []}'
    yield b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


async def no_http(call: Call) -> AsyncIterator[bytes]:
    yield b"220 smtp.example.org\r\n\r\n"


async def error_event(call: Call) -> AsyncIterator[bytes]:
    yield EVENT_STREAM + chunk(piece(call, "a")) + chunk(event({"error": {"message": "engine died"}})) + END


async def no_text(call: Call) -> AsyncIterator[bytes]:
    yield EVENT_STREAM + chunk(piece(call, "", "stop")) + chunk(usage(call, 0)) + END


async def too_many(call: Call) -> AsyncIterator[bytes]:
    yield refuse(429, "queue is full")


async def too_many_and_closes(call: Call) -> AsyncIterator[bytes]:
    yield refuse(429, "queue is full", close=True)


async def never(call: Call) -> AsyncIterator[bytes]:
    yield EVENT_STREAM + chunk(piece(call, "a"))
    await asyncio.sleep(60)


class TestFailures:
    def test_no_answer_on_a_new_connection_either(self):
        async def only_once(call: Call) -> AsyncIterator[bytes]:
            async for data in reset(call) if call.number else whole_answer(call):
                yield data

        with FakeServer(only_once) as server:
            document = measure(server, concurrency=1, num_requests=3)
        assert document["errors"]["connection"]["count"] == document["summary"]["num_failed"] == 2
        assert "without an answer" in document["errors"]["connection"]["first"]

    @pytest.mark.parametrize(
        ("answer", "kind", "words"),
        [
            (cut_in_a_chunk, "cut_off", "middle"),
            (ends_too_early, "cut_off", "neither [DONE] nor"),
            (no_json, "malformed", "{oops"),
            (wrong_types, "malformed", "none"),
            (no_stream, "malformed", "application/json"),
            (no_http, "malformed", "220 smtp"),
            (error_event, "error_event", "engine died"),
            (no_text, "empty", "no text"),
            (too_many, "http_429", "queue is full"),
            (too_many_and_closes, "http_429", "queue is full"),
            (never, "timeout", "within 0.2 s"),
        ],
        ids=lambda value: getattr(value, "__name__", None),
    )
    def test_kinds(self, answer, kind, words):
        """Every other request fails; the rest are measured all the same."""

        async def mixed(call: Call) -> AsyncIterator[bytes]:
            async for data in answer(call) if call.number % 2 else whole_answer(call):
                yield data

        with FakeServer(mixed) as server:
            document = measure(server, concurrency=1, timeout=0.2 if kind == "timeout" else 20.0, slo="e2e:1e9")
        assert {name: error["count"] for name, error in document["errors"].items()} == {kind: 3}
        assert words in document["errors"][kind]["first"]
        summary = document["summary"]
        assert (summary["num_ok"], summary["num_failed"], summary["output_tokens"]) == (3, 3, 12)
        assert summary["goodput"]["num_met"] == 3
        assert f"3 failed with {kind}" in format_report(document)

    def test_nobody_there(self):
        with FakeServer() as server:
            pass
        with pytest.raises(EngineError, match="Is the server running"):
            measure(server)

    def test_a_server_that_refuses_the_first_request_is_not_measured(self):
        with FakeServer(too_many) as server, pytest.raises(EngineError, match=r"http_429.*queue is full"):
            measure(server, warmup=1)
        assert len(server.calls) == 1

    def test_a_server_that_goes_away_after_finish_without_done(self):
        async def answer(call: Call) -> AsyncIterator[bytes]:
            yield (
                b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
                + piece(call, "a")
                + piece(call, "b", "stop")
            )

        with FakeServer(answer) as server:
            document = measure(server, concurrency=1)
        assert document["summary"]["num_ok"] == 6
        assert server.num_connections == 6, "the first was used for the list of models before"


class TestSpawn:
    def test_the_server_is_found_used_and_stopped(self):
        async def use() -> tuple[str, int | None, str]:
            async with spawn([sys.executable, FAKE]) as (server, url):
                assert server.exit_status is None
            return url, server.exit_status, server.last_lines

        url, status, words = asyncio.run(use())
        assert url.startswith("http://127.0.0.1:")
        assert status == 0
        assert words.endswith("fake: bye")

    def test_a_server_that_dies_says_why(self):
        script = "import sys; print('no such model', file=sys.stderr); sys.exit(3)"

        async def use() -> None:
            async with spawn([sys.executable, "-c", script]):
                pass

        with pytest.raises(EngineError, match=r"status 3 .*\n.*no such model"):
            asyncio.run(use())

    def test_a_server_that_is_never_ready(self, monkeypatch):
        monkeypatch.setattr(server_process, "START_S", 0.3)
        monkeypatch.setattr(server_process, "STOP_S", 0.3)
        script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"

        async def use() -> None:
            async with spawn([sys.executable, "-c", script]):
                pass

        with pytest.raises(EngineError, match=r"not ready within 0\.3 s"):
            asyncio.run(use())

    def test_a_measurement_of_its_own_server(self, monkeypatch):
        monkeypatch.setattr("quire.bench.serve.run.serve_command", lambda settings: [sys.executable, FAKE])
        settings = Settings(seed=1, spawn=True, num_requests=4, output_tokens=3, concurrency=2)
        document = run(settings, lambda done, total: None)
        assert document["summary"]["num_ok"] == 4
        assert "server_died" not in document


def test_measuring_loads_no_torch():
    modules = "quire.bench.serve.run, quire.bench.serve.report, quire.cli.main"
    script = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
