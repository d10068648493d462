"""A server with two engines: what clients see of them, and that they do not see one die."""

from __future__ import annotations

import concurrent.futures
import os
import signal
from pathlib import Path

import pytest

from tests.server.running import Running, children, wait_for

pytestmark = pytest.mark.server

SMALL = ("--max-len", "1024", "--kv-memory", "0.25", "--max-requests", "8", "--no-log-requests")


@pytest.fixture(scope="module")
def pair():
    with Running("--replicas", "2", *SMALL) as running:
        yield running


def engines(running: Running) -> list[int]:
    found = []
    for child in children(running.process.pid):
        if "quire.engine.process" in Path(f"/proc/{child}/cmdline").read_text().split("\0"):
            found.append(child)
    return found


def ask(running: Running, index: int, max_tokens: int = 60):
    body = {
        "prompt": f"Story {index}: once upon a time",
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    with running.client() as http:
        answer = http.post("/v1/completions", json=body, headers={"x-request-id": f"ask-{index}"}, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]


def test_an_engine_that_dies_is_not_seen(pair, server):
    assert any("2 replicas" in line for line in pair.lines)
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        expected = list(pool.map(lambda index: ask(server, index), range(12)))
        working = [pool.submit(ask, pair, index) for index in range(12)]
        os.kill(engines(pair)[0], signal.SIGKILL)
        assert [future.result() for future in working] == expected
    with pair.client() as http:
        assert "quire_engine_restarts_total 1.0" in http.get("/metrics").text
        wait_for(lambda: all(replica["ready"] for replica in http.get("/replicas").json()["replicas"]))
        wait_for(lambda: "quire_requests_running 0.0" in http.get("/metrics").text)


def test_replicas_and_receipts(pair):
    ask(pair, 77, 4)
    with pair.client() as http:
        replicas = http.get("/replicas").json()["replicas"]
        assert [replica["replica"] for replica in replicas] == [0, 1]
        assert all(replica["answers"] == 0 for replica in replicas)
        (receipt,) = http.get("/replicas/receipts/ask-77").json()["receipts"]
        assert receipt.startswith("replica ")
        assert "tokens cached" in receipt
        missing = http.get("/replicas/receipts/never")
        assert missing.status_code == 404
        assert "never" in missing.json()["error"]["message"]


def test_a_replica_is_drained_under_requests(pair):
    with pair.client() as http, concurrent.futures.ThreadPoolExecutor(8) as pool:
        expected = list(pool.map(lambda index: ask(pair, index, 80), range(8)))
        working = [pool.submit(ask, pair, index, 80) for index in range(8)]
        wait_for(lambda: sum(replica["answers"] for replica in http.get("/replicas").json()["replicas"]) > 4)
        busy = max(http.get("/replicas").json()["replicas"], key=lambda replica: replica["answers"])["replica"]
        drained = http.post(f"/replicas/{busy}/drain", json={}).json()
        assert drained["replica"] == busy
        assert drained["moved"] + drained["recomputed"] + drained["queued"] > 0
        assert [future.result() for future in working] == expected
        draining = [replica["draining"] for replica in http.get("/replicas").json()["replicas"]]
        assert draining == [busy == 0, busy == 1]
        refused = http.post(f"/replicas/{1 - busy}/drain", json={})
        assert (refused.status_code, "only one" in refused.text) == (400, True)
        assert http.post("/replicas/1/drain").status_code == 400, "a page of another origin can send this"
        assert http.post("/replicas/x/drain", json={}).status_code == 400
        replicas = http.post(f"/replicas/{busy}/undrain", json={}).json()["replicas"]
        assert not any(replica["draining"] for replica in replicas)


def test_one_engine_has_no_receipts(server):
    with server.client() as http:
        assert http.get("/replicas").json() == {"replicas": [{"replica": 0, "ready": True}]}
        assert http.get("/replicas/receipts/x").status_code == 404
        assert "one engine" in http.post("/replicas/0/drain", json={}).json()["error"]["message"]
