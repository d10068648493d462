"""The console's routes of a real server with two tenants: its figures are those of /metrics, and the engine may die."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.server.running import Running, wait_for

pytestmark = pytest.mark.server

KEYS = {"ann": "secret-of-ann", "bob": "secret-of-bob"}


@pytest.fixture(scope="module")
def running(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
    options = ("--api-key-file", str(keys), "--max-len", "512", "--kv-memory", "0.1", "--max-requests", "2")
    with Running(*options) as running:
        yield running


class Watch:
    """Reads the stream of a tenant in a thread."""

    def __init__(self, running: Running, name: str) -> None:
        self.lines: list[dict[str, Any]] = []
        self._http = client(running, name)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        wait_for(lambda: self.lines)

    def _read(self) -> None:
        with self._http.stream("GET", "/console/live") as response:
            assert response.headers["content-type"] == "application/x-ndjson"
            for line in response.iter_lines():
                self.lines.append(json.loads(line))
                if self._ended.is_set():
                    return

    def states(self) -> list[dict[str, Any]]:
        return [line for line in list(self.lines) if line["type"] in ("snapshot", "delta")]

    def rows(self) -> list[dict[str, Any]]:
        return [row for state in self.states() for row in state["requests"]]

    def close(self) -> None:
        self._ended.set()  # the next line is at most a ping away
        self._thread.join()
        self._http.close()


def client(running: Running, name: str) -> httpx2.Client:
    return running.client(headers={"authorization": f"Bearer {KEYS[name]}"})


def complete(running: Running, name: str, prompt: str, request_id: str, max_tokens: int = 40) -> None:
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    with client(running, name) as http:
        answer = http.post("/v1/completions", json=body, headers={"x-request-id": request_id})
    assert answer.status_code == 200, answer.text


def complete_all(running: Running, name: str, count: int, max_tokens: int = 40) -> None:
    threads = [
        threading.Thread(
            target=complete, args=(running, name, f"Story {index} of {name}:", f"{name}{index}", max_tokens)
        )
        for index in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_two_tenants_watch_a_server_whose_engine_dies(running: Running) -> None:
    ann, bob = Watch(running, "ann"), Watch(running, "bob")
    try:
        complete_all(running, "ann", 5)
        wait_for(lambda: ann.states() and ann.states()[-1]["num_running"] == 0 and ann.rows())
        check_figures(ann.states())
        assert any(row["wait"] and row["wait"]["resource"] == "rows" for row in ann.rows())
        assert {row["id"] for row in ann.rows()} <= {
            f"ann{index}-{index2}" for index in range(5) for index2 in range(9)
        }
        assert {(row["id"], row["tenant"], row["own"]) for row in bob.rows()} == {(None, None, False)}
        with client(running, "ann") as http:
            (life,) = http.get("/console/requests/ann3").json()["requests"]
            tree = http.get("/console/cache").json()
            totals = metrics(http)
        assert (life["state"], life["finish"], life["output_tokens"]) == ("ended", "length", 40)
        assert [event["kind"] for event in life["events"]][:2] == ["queued", "prompt"]
        assert any("of ann" in node["text"] for node in tree["nodes"])
        assert totals["quire_requests_running"] == 0
        assert ann.states()[-1]["totals"]["preemptions_total"] == totals["quire_preemptions_total"]
        with client(running, "bob") as http:
            assert http.get("/console/requests/ann3").status_code == 404
            tree = http.get("/console/cache").json()
        assert (tree["nodes"], [tenant["own"] for tenant in tree["tenants"]]) == ([], [False])

        long = threading.Thread(target=complete, args=(running, "ann", "A long story:", "long", 200))
        long.start()
        wait_for(lambda: any(row["id"] and row["id"].startswith("long") for row in ann.rows()))
        os.kill(running.engine_pid(), signal.SIGKILL)
        long.join()
        ready = [line["ready"] for line in ann.lines if line["type"] == "engine"]
        assert ready == [False, True]
        with client(running, "ann") as http:
            (life,) = http.get("/console/requests/long").json()["requests"]
        assert "restarted" in [event["kind"] for event in life["events"]]
    finally:
        ann.close()
        bob.close()


def check_figures(states: list[dict[str, Any]]) -> None:
    """Each line's figures are those of the metrics at that moment, and follow each other."""
    engine, sequence = states[0]["engine"], 0
    for state in states:
        assert state["type"] == "snapshot" or state["sequence"] == sequence + 1
        sequence = state["sequence"]
        totals, num_blocks = state["totals"], engine["num_blocks"]
        assert totals["requests_running"] == state["num_running"]
        assert totals["requests_waiting"] == state["num_waiting"]
        assert totals["kv_cache_use_ratio"] == (num_blocks - state["num_free_blocks"]) / num_blocks


def metrics(http: httpx2.Client) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


@pytest.mark.parametrize(
    ("path", "status"),
    [("/console/cache?replica=1", 400), ("/console/cache?replica=x", 400), ("/console/requests/nobody", 404)],
)
def test_what_is_not_there_is_refused(running: Running, path: str, status: int) -> None:
    with client(running, "ann") as http:
        answer = http.get(path)
    assert answer.status_code == status
    assert answer.json()["error"]["message"].endswith(".")


@pytest.mark.parametrize("path", ["/console/live", "/console/cache", "/console/requests/x"])
def test_a_key_is_needed(running: Running, path: str) -> None:
    with running.client() as http:
        assert http.get(path).status_code == 401
