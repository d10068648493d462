"""A server that is told to stop twice: streams of every kind end with an event that says so."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import Running, wait_for

pytestmark = pytest.mark.server

# Neither can end by itself before its tokens are used up.
LONG_TEXT = {"format": {"type": "json_schema", "schema": {"type": "string", "minLength": 5000}}}
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "Go on for ever.", "max_output_tokens": 1500, "ignore_eos": True},
    "/v1/messages": {
        "messages": [{"role": "user", "content": "Go on for ever."}],
        "max_tokens": 1500,
        "output_config": LONG_TEXT,
    },
}
LAST = {"/v1/responses": "event: response.failed", "/v1/messages": "event: error"}


class Reader(threading.Thread):
    """Reads one stream to its end."""

    def __init__(self, running: Running, path: str) -> None:
        super().__init__(daemon=True)
        self.running = running
        self.path = path
        self.lines: list[str] = []
        self.start()

    def run(self) -> None:
        body = {**STREAMS[self.path], "stream": True}
        with self.running.client() as http, http.stream("POST", self.path, json=body) as response:
            for line in response.iter_lines():
                self.lines.append(line)

    @property
    def has_text(self) -> bool:
        return any("delta" in line for line in self.lines)


def test_streams_end_with_an_event_when_the_server_is_aborted(default_model: Path):
    with Running("--max-len", "2048", "--kv-memory", "1") as running:
        readers = [Reader(running, path) for path in STREAMS]
        wait_for(lambda: all(reader.has_text for reader in readers))
        running.terminate()
        with running.client() as http:
            wait_for(lambda: http.get("/ready").status_code == 503)
            for path, body in STREAMS.items():
                assert http.post(path, json={**body, "stream": True}).status_code == 503
        running.terminate()
        for reader in readers:
            reader.join(30)
            assert [line for line in reader.lines if line.startswith("event: ")][-1] == LAST[reader.path]
        running.wait()
