"""Early exit over HTTP: what is counted, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.weights.heads import Target
from quire.weights.loader import load_model
from tests.server.running import Running
from tests.tools.exits import exit_config, exit_tensors
from tests.tools.heads import write_head
from tests.tools.native import kernels_of

pytestmark = pytest.mark.server

BODY: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def exiting(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose exit head has random weights."""
    loaded = load_model(default_model, dtype="float32", ops=kernels_of())
    target = Target(loaded.model, loaded.config)
    config = exit_config(target, layer=12)
    directory = write_head(tmp_path_factory.mktemp("head"), config, exit_tensors(config, target.config, 4000))
    del loaded, target
    with Running("--max-len", "512", "--kv-memory", "0.5", "--exit-head", str(directory)) as running:
        yield running


def test_tokens_that_exit_are_counted(exiting: Running) -> None:
    with exiting.client() as client:
        plain = client.post("/v1/completions", json=BODY).json()
        answer = client.post("/v1/completions", json={**BODY, "early_exit": 1e-6}).json()
        again = client.post("/v1/completions", json=BODY).json()
        metrics = client.get("/metrics").text
        assert client.post("/v1/chat/completions", json={**CHAT, "early_exit": 0.99}).status_code == 200
        assert client.post("/v1/responses", json={"input": "Hello", "early_exit": 0.99}).status_code == 200
    assert plain["usage"]["completion_tokens_details"]["early_exit_tokens"] == 0
    assert answer["usage"]["completion_tokens_details"]["early_exit_tokens"] == 24 - 1 - 2
    assert answer["choices"][0]["text"] != plain["choices"][0]["text"]
    assert again["choices"][0]["text"] == plain["choices"][0]["text"]
    assert "quire_early_exit_tokens_total 21.0" in metrics


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"early_exit": 1}, "no exit is sure"),
        ({"early_exit": "high"}, "early_exit: give a number"),
        ({"early_exit": 0.9, "logprobs": 1}, "log probabilities"),
        ({"early_exit": 0.9, "guided_regex": "a+"}, "grammar"),
        ({"early_exit": 0.9, "use_beam_search": True, "n": 2}, "beam search"),
    ],
)
def test_what_cannot_be_done_is_refused(exiting: Running, fields: dict[str, Any], named: str) -> None:
    with exiting.client() as client:
        answer = client.post("/v1/completions", json={**BODY, **fields})
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_without_an_exit_head_it_is_refused(server: Running, stream: bool) -> None:
    with server.client() as client:
        answer = client.post("/v1/completions", json={**BODY, "early_exit": 0.9, "stream": stream})
    assert answer.status_code == 400
    assert "--exit-head DIR" in answer.json()["error"]["message"]
