"""`quire serve --trace`: what a server records of its requests, also when its engine is killed."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quire.bench.replay import replay
from quire.bench.replay_server import replay_on
from quire.config import EngineConfig
from quire.errors import InvalidParams
from quire.server.config import ServerConfig
from quire.server.main import Server
from quire.trace.diff import compare
from quire.trace.reader import read_recording
from quire.trace.recording import Recording
from tests.server.running import Running

pytestmark = pytest.mark.server

BODIES = [
    {"prompt": "Once upon a time", "max_tokens": 150, "temperature": 0, "ignore_eos": True, "stream": True},
    {"prompt": "One, two, three,", "max_tokens": 12, "temperature": 0.8, "n": 3, "seed": 5},
    {"prompt": "The sky is", "max_tokens": 12, "temperature": 0.9, "top_k": 30, "repetition_penalty": 1.1},
    {"prompt": "A number:", "max_tokens": 12, "structured_outputs": {"regex": "[0-9]{2,9}"}},
    {"prompt": "One, two, three, four,", "max_tokens": 40, "temperature": 0, "stop": [" nine"]},
    {"prompt": "The capital of France is", "max_tokens": 5, "use_beam_search": True, "n": 2, "temperature": 0},
]


@pytest.fixture(scope="module")
def recorded(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """A server whose engine is killed while it answers."""
    path = tmp_path_factory.mktemp("recording") / "trace"
    with Running("--trace", str(path), "--max-len", "512", "--kv-memory", "0.2") as running:
        with running.client() as client, ThreadPoolExecutor() as pool:
            others = []
            with client.stream("POST", "/v1/completions", json=BODIES[0]) as stream:
                for number, _ in enumerate(stream.iter_lines()):
                    if number == 4:
                        others = [pool.submit(client.post, "/v1/completions", json=body) for body in BODIES[1:]]
                    if number == 12:
                        os.kill(running.engine_pid(), signal.SIGKILL)
            assert [other.result().status_code for other in others] == [200] * 5
        running.terminate()
        assert running.wait() == 0
    return read_recording(path)


def test_it_has_every_request_and_what_became_of_it(recorded):
    assert recorded.is_closed
    assert len(recorded.requests) == 8
    assert len(recorded.engines) == 2
    assert len(recorded.restarts) == 1
    assert recorded.num_resumed >= 1
    assert sorted(request.end.finish for request in recorded.requests.values())[0] == "abort", "the stop string"
    assert len(recorded.requests["0"].tokens) == 150
    assert all(0 <= request.at < request.end.at for request in recorded.requests.values())
    assert all(step.at <= step.done for step in recorded.steps)
    (beams,) = [request.end.beams for request in recorded.requests.values() if request.end.beams]
    assert len(beams) == 2


def test_it_replays_to_the_same_tokens(recorded, default_model):
    config = EngineConfig.of(recorded.engine.config)
    found = compare(recorded, replay(recorded, config, default_model, speed=float("inf"), report=lambda *counts: None))
    assert found.identical
    assert found.num_compared == 8
    assert found.num_cut == 1


def test_another_server_gives_the_same_tokens(recorded, server):
    found = compare(recorded, replay_on(recorded, server.url, None, speed=5.0, report=lambda *counts: None))
    assert found.identical
    assert found.num_compared == 8
    assert found.num_tokens > 190


def test_a_file_that_exists_is_refused_before_the_model_is_loaded(tmp_path):
    (tmp_path / "a").touch()
    with pytest.raises(InvalidParams, match="exists"):
        Server(EngineConfig(), ServerConfig(trace=str(tmp_path / "a")), tmp_path)


def test_a_switch_without_a_file_is_refused():
    with pytest.raises(InvalidParams, match="trace_anonymous needs trace"):
        ServerConfig(trace_anonymous=True)
