"""Beam search over HTTP: the same answers as offline, and clear refusals."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from typing import Any

import httpx2
import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.beam_search import BeamSearchParams
from quire.core.outputs import RequestOutput
from tests.server.running import Running
from tests.tools.tiny_models import tiny_text_gguf

pytestmark = pytest.mark.server

OPTIONS = {"max_len": 128, "num_blocks": 256}
SEARCH = {"prompt": "hello", "use_beam_search": True, "max_tokens": 8, "return_token_ids": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return str(tiny_text_gguf(path, **{"general.sampling.temp": 0.8, "general.sampling.top_k": 5}))


@pytest.fixture(scope="module")
def offline(model: str):
    with LLM(model, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def serving(model: str):
    with Running("--max-len", "128", "--num-blocks", "256", model=model) as running:
        yield running


@pytest.fixture(scope="module")
def http(serving: Running):
    with serving.client() as http:
        yield http


def complete(http: httpx2.Client, **more: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json={**SEARCH, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_it_is_the_offline_search(http: httpx2.Client, offline: LLM) -> None:
    (expected,) = offline.beam_search(["hello"], BeamSearchParams(beam_width=4, max_tokens=8))
    document = complete(http, best_of=4, n=3)
    assert [choice["token_ids"] for choice in document["choices"]] == [beam.tokens for beam in expected.sequences[:3]]
    assert [choice["index"] for choice in document["choices"]] == [0, 1, 2]
    assert document["usage"]["completion_tokens"] == sum(len(beam.tokens) for beam in expected.sequences[:3])


def test_without_best_of_it_is_as_wide_as_n(http: httpx2.Client) -> None:
    wide = complete(http, best_of=4, n=4)
    assert complete(http, n=4)["choices"] == wide["choices"]


def test_length_penalty_and_early_stopping(http: httpx2.Client, offline: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8, length_penalty=-0.5, early_stopping="never")
    (expected,) = offline.beam_search(["hello"], params)
    made = complete(http, n=3, length_penalty=-0.5, early_stopping="never")["choices"]
    assert [choice["token_ids"] for choice in made] == [beam.tokens for beam in expected.sequences]


def test_log_probabilities_and_echo(http: httpx2.Client) -> None:
    document = complete(http, n=2, best_of=4, logprobs=2, echo=True)
    for choice in document["choices"]:
        assert choice["text"].startswith("hello")
        logprobs = choice["logprobs"]["token_logprobs"]
        assert logprobs[0] is None
        assert len(logprobs) == len(choice["token_ids"]) + 1
    totals = [sum(choice["logprobs"]["token_logprobs"][1:]) for choice in document["choices"]]
    assert totals == sorted(totals, reverse=True)


def test_a_stop_string_ends_beams(http: httpx2.Client) -> None:
    best = complete(http, best_of=4)["choices"][0]
    stop = best["text"][1:3]
    made = complete(http, best_of=4, n=4, stop=stop, length_penalty=0)["choices"]  # so that short answers win
    assert any(choice["stop_reason"] == stop for choice in made)
    for choice in made:
        assert stop not in choice["text"]
        assert (choice["finish_reason"] == "stop") == (choice["stop_reason"] is not None)


def test_a_structured_answer(http: httpx2.Client) -> None:
    """Answers differ in their tokens; a text may be spelled by several."""
    words = {"yes", "no", "maybe"}
    made = complete(http, n=6, max_tokens=20, guided_choice=sorted(words))["choices"]
    assert {choice["text"] for choice in made} <= words
    assert len({choice["text"] for choice in made}) > 1
    assert len({tuple(choice["token_ids"]) for choice in made}) == len(made)
    assert {choice["finish_reason"] for choice in made} == {"stop"}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"stream": True}, ["stream", "known at its end"]),
        ({"temperature": 0.7}, ["temperature is 0.7", "Set temperature to 0"]),
        ({"top_p": 0.9}, ["top_p"]),
        ({"repetition_penalty": 1.1}, ["repetition_penalty"]),
        ({"logit_bias": {"5": 1}}, ["logit_bias"]),
        ({"n": 4, "best_of": 2}, ["best_of", "n = 4"]),
        ({"best_of": 65}, ["best_of", "64"]),
        ({"max_tokens": 0}, ["max_tokens"]),
        ({"early_stopping": "always"}, ["early_stopping"]),
        ({"length_penalty": "long"}, ["length_penalty"]),
        ({"use_beam_search": False, "length_penalty": 2.0}, ["length_penalty", "use_beam_search"]),
        ({"use_beam_search": False, "best_of": 2}, ["best_of", "use_beam_search"]),
    ],
)
def test_what_cannot_be_is_refused(http: httpx2.Client, more: dict[str, Any], words: list[str]) -> None:
    answer = http.post("/v1/completions", json={**SEARCH, **more})
    assert answer.status_code == 400
    for word in words:
        assert word in answer.json()["error"]["message"]


def test_sampling_parameters_that_change_nothing_are_taken(http: httpx2.Client) -> None:
    plain = complete(http, n=2)
    same = complete(http, n=2, temperature=0, top_p=1, top_k=-1, seed=7, presence_penalty=0, early_stopping=False)
    assert same["choices"] == plain["choices"]


def test_a_search_outlives_its_engine(model: str) -> None:
    """It delivers nothing before its end, so a new engine begins it again."""
    long = {"n": 8, "max_tokens": 110, "ignore_eos": True}
    with Running("--max-len", "128", "--num-blocks", "256", model=model) as running, running.client() as http:
        expected = complete(http, **long)["choices"]
        made: list[Any] = []
        for delay in (0.04, 0.02, 0.01, 0.0):  # until the engine is stopped before the search ends
            made.clear()
            thread = threading.Thread(target=lambda: made.append(complete(http, **long)["choices"]))
            thread.start()
            time.sleep(delay)
            os.kill(running.engine_pid(), signal.SIGSTOP)
            thread.join(0.5)
            if thread.is_alive():
                break
            os.kill(running.engine_pid(), signal.SIGCONT)
        os.kill(running.engine_pid(), signal.SIGKILL)
        thread.join(60)
        assert made == [expected]
        assert "quire_engine_restarts_total 1.0" in http.get("/metrics").text


def test_generate_and_streams_give_the_same(offline: LLM, model: str) -> None:
    params = SamplingParams(use_beam_search=True, n=2, best_of=4, temperature=0.0, max_tokens=8, logprobs=1)
    (out,) = offline.generate(["hello"], params)
    (expected,) = offline.beam_search(["hello"], BeamSearchParams(beam_width=4, max_tokens=8))
    assert [answer.token_ids for answer in out.outputs] == [beam.tokens for beam in expected.sequences[:2]]
    for answer, beam in zip(out.outputs, expected.sequences, strict=False):
        assert answer.cumulative_logprob == beam.cum_logprob
        assert answer.logprobs is not None
        assert sum(entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)) == (
            pytest.approx(beam.cum_logprob, abs=1e-5)
        )
    *_, last = offline.stream("hello", params)
    assert last.outputs == out.outputs
    engine = AsyncLLM(model, **OPTIONS)

    async def last_of() -> RequestOutput:
        found = [grown async for grown in engine.generate("hello", params)]
        return found[-1]

    assert asyncio.run(last_of()).outputs == out.outputs
    engine.shutdown()


def test_chat(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 6, "use_beam_search": True, "n": 2}
    with server.client() as http:
        document = http.post("/v1/chat/completions", json={**body, "best_of": 3, "logprobs": True}).json()
    assert [choice["index"] for choice in document["choices"]] == [0, 1]
    totals = [sum(each["logprob"] for each in choice["logprobs"]["content"]) for choice in document["choices"]]
    assert totals == sorted(totals, reverse=True)
    assert document["choices"][0]["message"]["content"] != document["choices"][1]["message"]["content"]
