"""A server under pressure: its engine dies, its clients go, it is told to stop, too much is asked of it."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import time

import httpx2
import pytest

from tests.server.running import Running, wait_for

pytestmark = pytest.mark.server

LONG = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}
SMALL = ("--max-len", "2048", "--kv-memory", "0.5", "--no-log-requests")


def figure(http, name):
    for line in http.get("/metrics").text.splitlines():
        if line.startswith(f"{name} "):
            return float(line.rsplit(" ", 1)[1])
    raise LookupError(name)


def raw_request(document):
    body = json.dumps(document)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def read_stream(running, body, seen=None):
    """The text of a streamed completion, the reason it ended, and errors that came as events."""
    text, reason, errors = "", None, []
    with (
        running.client() as http,
        http.stream("POST", "/v1/completions", json={**body, "stream": True}, timeout=120) as answer,
    ):
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            document = json.loads(line[6:])
            if "error" in document:
                errors.append(document["error"]["message"])
                continue
            for choice in document["choices"]:
                text += choice["text"]
                reason = choice["finish_reason"] or reason
            if seen is not None:
                seen.append(1)
    return text, reason, errors


def test_streams_go_on_when_the_engine_is_killed(server):
    bodies = [
        {"prompt": f"Story number {n}:", "max_tokens": 60, "ignore_eos": True, "temperature": 0.7, "seed": n}
        for n in range(12)
    ]
    with server.client() as http, concurrent.futures.ThreadPoolExecutor(16) as pool:
        calm = [http.post("/v1/completions", json=body).json()["choices"][0]["text"] for body in bodies]
        before, seen = figure(http, "quire_engine_restarts_total"), []
        working = [pool.submit(read_stream, server, body, seen) for body in bodies]
        for kill in range(2):
            wanted = len(seen) + 60
            wait_for(lambda wanted=wanted: len(seen) >= wanted)
            os.kill(server.engine_pid(), signal.SIGKILL)
            wait_for(lambda kill=kill: figure(http, "quire_engine_restarts_total") == before + kill + 1)
            assert http.get("/health").status_code == 200
        assert [task.result() for task in working] == [(text, "length", []) for text in calm]


def test_a_client_that_goes_frees_its_blocks(server):
    with server.client() as http:
        for is_stream in (True, False):
            with socket.create_connection(server.url.removeprefix("http://").split(":")) as connection:
                connection.sendall(raw_request({**LONG, "stream": is_stream}))
                wait_for(lambda: figure(http, "quire_requests_running") >= 1)
            wait_for(lambda: figure(http, "quire_requests_running") == 0)


def test_a_reader_that_never_reads_harms_nobody(server):
    with socket.create_connection(server.url.removeprefix("http://").split(":")) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(raw_request({**LONG, "stream": True, "n": 2}))
        text, reason, errors = read_stream(server, {"prompt": "Hi", "max_tokens": 30, "ignore_eos": True})
    assert text
    assert (reason, errors) == ("length", [])


def test_thousands_of_requests_wait_their_turn(server):
    """Forty calls of a hundred prompts each, at once; the server answers others in the middle of it."""
    body = {"prompt": [f"Number {n}" for n in range(100)], "max_tokens": 1, "temperature": 0}
    with server.client() as http, concurrent.futures.ThreadPoolExecutor(40) as pool:
        asked = [pool.submit(http.post, "/v1/completions", json=body, timeout=300) for _ in range(40)]
        wait_for(lambda: figure(http, "quire_requests_waiting") > 1000)
        assert http.get("/health").status_code == 200
        answers = [task.result() for task in asked]
    texts = {tuple(choice["text"] for choice in answer.json()["choices"]) for answer in answers}
    assert {answer.status_code for answer in answers} == {200}
    assert len(texts) == 1
    assert len(texts.pop()) == 100


def test_sigterm_lets_running_requests_finish(default_model):
    with Running(*SMALL) as running, concurrent.futures.ThreadPoolExecutor(4) as pool:
        seen = []
        working = pool.submit(read_stream, running, {**LONG, "max_tokens": 200}, seen)
        wait_for(lambda: len(seen) > 3)
        running.terminate()
        with running.client() as http:
            wait_for(lambda: http.get("/ready").status_code == 503)
            refused = http.post("/v1/completions", json=LONG)
            assert refused.status_code == 503
            assert "shutting down" in refused.json()["error"]["message"]
        text, reason, errors = working.result()
        assert text
        assert (reason, errors) == ("length", [])
        assert running.wait() == 0


def test_a_second_sigterm_ends_streams_with_a_last_event(default_model):
    with Running(*SMALL) as running, concurrent.futures.ThreadPoolExecutor(4) as pool:
        seen = []
        working = pool.submit(read_stream, running, LONG, seen)
        wait_for(lambda: len(seen) > 3)
        running.terminate()
        with running.client() as http:
            wait_for(lambda: http.get("/ready").status_code == 503)
        running.terminate()
        _, reason, errors = working.result()
        assert reason is None
        assert len(errors) == 1
        assert "shut down" in errors[0]
        assert running.wait() == 0


def test_the_drain_has_an_end(default_model):
    with Running(*SMALL, "--drain-timeout", "0.5") as running, concurrent.futures.ThreadPoolExecutor(4) as pool:
        seen = []
        working = pool.submit(read_stream, running, LONG, seen)
        wait_for(lambda: len(seen) > 3)
        running.terminate()
        assert len(working.result()[2]) == 1
        assert running.wait() == 0


def test_keys_queue_and_deadline(default_model, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# tenants\nann ann-secret-1\nbob bob-secret-2\n")
    options = ("--api-key-file", str(keys), "--max-requests", "2", "--max-queue-requests", "2")
    options += ("--speculate", "off")  # requests must take longer than their deadline
    with Running(*SMALL, *options, "--request-timeout", "5", "--log-requests") as running, running.client() as http:
        assert http.get("/health").status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong-secret"}, {"authorization": "Basic ann-secret-1"}):
            for path in ("/v1/models", "/metrics", "/health/generate", "/openapi.json"):
                assert http.get(path, headers=headers).status_code == 401
        ann, bob = {"authorization": "Bearer ann-secret-1"}, {"x-api-key": "bob-secret-2"}
        assert http.get("/v1/models", headers=ann).status_code == 200
        prompt = "A prompt long enough to fill a few blocks of the cache, so that it can be found again. " * 3

        def cached(headers):
            answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}, headers=headers)
            return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert cached(ann) == 0
        assert cached(ann) > 0
        assert cached(bob) == 0  # one tenant's prompts do not show in another's times

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            body = {**LONG, "max_tokens": 1900}
            asked = [pool.submit(http.post, "/v1/completions", json=body, headers=ann) for _ in range(4)]
            wait_for(lambda: figure_with(http, "quire_requests_running", ann) == 2)
            wait_for(lambda: http.post("/v1/completions", json=LONG, headers=bob).status_code == 429)
            answer = http.post("/v1/completions", json=LONG, headers=bob)
            assert int(answer.headers["retry-after"]) >= 1
            assert "4" in answer.json()["error"]["message"]
            late = [task.result() for task in asked]
        assert {answer.status_code for answer in late} == {504}
        assert "5 s" in late[0].json()["error"]["message"]
        log = [json.loads(line) for line in running.lines if line.startswith("{")]
        assert {line["tenant"] for line in log} == {"", "ann", "bob"}
        assert not any("secret" in line for line in running.lines)


def figure_with(http, name, headers):
    page = http.get("/metrics", headers=headers).text
    return next(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(f"{name} "))


def test_cors_and_tls(default_model, tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    made = subprocess.run([*command, "-keyout", key, "-out", cert], capture_output=True)
    if made.returncode:
        pytest.skip("openssl is not here")
    options = ("--tls-cert", str(cert), "--tls-key", str(key), "--cors-origins", "https://page.example")
    with Running(*SMALL, *options) as running, httpx2.Client(base_url=running.url, verify=False) as http:
        assert running.url.startswith("https://")
        assert http.get("/health").status_code == 200
        asked = {"origin": "https://page.example", "access-control-request-method": "POST"}
        allowed = http.options("/v1/completions", headers=asked)
        assert allowed.headers["access-control-allow-origin"] == "https://page.example"
        other = http.options("/v1/completions", headers={**asked, "origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--port", "99999"), ["99999"]),
        (("--api-key", "short"), ["at least 8"]),
        (("--tls-cert", "x.pem"), ["tls_key"]),
        (("--max-len", "100000000"), ["max_len"]),
        (("--api-key-file", "/nowhere/keys"), ["/nowhere/keys"]),
    ],
)
def test_a_server_that_cannot_start_says_why(default_model, options, words):
    running = Running(*options)
    assert running.wait(60) != 0
    with pytest.raises(AssertionError):
        running.url  # noqa: B018
    said = "\n".join(running.lines)
    assert all(word in said for word in words), said
    assert "Traceback" not in said
    running.process.stderr.close()


def test_a_port_that_is_taken(server):
    port = server.url.rsplit(":", 1)[1]
    running = Running("--port", port)
    assert running.wait(60) == 2
    time.sleep(0.1)
    assert any(port in line and "cannot be listened on" in line for line in running.lines), running.lines
    running.process.stderr.close()
