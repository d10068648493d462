"""TGI's API, through huggingface_hub's client and plain HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx2
import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import ValidationError

from quire.server.tgi.protocol import Parameters
from tests.server.running import Running, wait_for

pytestmark = pytest.mark.server

PROMPT = "The capital of France is"
SEEDED = {"do_sample": True, "temperature": 1.1, "top_p": 0.95, "seed": 11, "max_new_tokens": 24}
TIMES = ("total", "validation", "queue", "inference")


@pytest.fixture(scope="module")
def hub(server: Running) -> InferenceClient:
    return InferenceClient(base_url=server.url)


@pytest.fixture(scope="module")
def http(server: Running):
    with server.client() as client:
        yield client


def ask(http: httpx2.Client, path: str = "/generate", inputs: str = PROMPT, **parameters: Any) -> httpx2.Response:
    return http.post(path, json={"inputs": inputs, "parameters": parameters})


def good(response: httpx2.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def events(response: httpx2.Response) -> list[dict[str, Any]]:
    """Every event of a stream, which holds nothing else."""
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    return [json.loads(block.removeprefix("data:")) for block in blocks]


class TestHubClient:
    def test_text(self, hub):
        assert "Paris" in hub.text_generation(PROMPT, max_new_tokens=8)

    def test_stream(self, hub):
        whole = hub.text_generation(PROMPT, **SEEDED)
        pieces = list(hub.text_generation(PROMPT, stream=True, **SEEDED))
        assert len(pieces) == 24
        assert "".join(pieces) == whole

    def test_details(self, hub):
        output = hub.text_generation(PROMPT, details=True, decoder_input_details=True, **SEEDED)
        details = output.details
        assert details.finish_reason == "length"
        assert details.generated_tokens == len(details.tokens) == 24
        assert details.seed == 11
        assert "".join(token.text for token in details.tokens) == output.generated_text
        assert all(token.logprob <= 0 for token in details.tokens)
        assert "".join(token.text for token in details.prefill) == PROMPT
        assert details.prefill[0].logprob is None
        assert all(token.logprob < 0 for token in details.prefill[1:])

    def test_stream_with_details(self, hub):
        outputs = list(hub.text_generation(PROMPT, stream=True, details=True, **SEEDED))
        assert [output.index for output in outputs] == list(range(1, 25))
        assert all(output.generated_text is None and output.details is None for output in outputs[:-1])
        last = outputs[-1]
        assert last.generated_text == "".join(output.token.text for output in outputs)
        assert last.details.finish_reason == "length"
        assert last.details.generated_tokens == 24
        assert last.details.input_length == 5
        assert last.details.seed == 11

    def test_async(self, server):
        async def both() -> tuple[str, list[str]]:
            async with AsyncInferenceClient(base_url=server.url) as hub:
                pieces = [piece async for piece in await hub.text_generation(PROMPT, stream=True, **SEEDED)]
                return await hub.text_generation(PROMPT, **SEEDED), pieces

        whole, pieces = asyncio.run(both())
        assert "".join(pieces) == whole

    def test_what_is_refused_is_a_validation_error(self, hub):
        with pytest.raises(ValidationError, match="watermark"):
            hub.text_generation(PROMPT, watermark=True)

    def test_what_is_refused_in_a_stream_is_an_error_too(self, hub):
        with pytest.raises(ValidationError, match="best_of"):
            hub.text_generation(PROMPT, stream=True, best_of=2, do_sample=True)

    def test_many_at_once(self, server):
        async def ask_all() -> list[str]:
            async with AsyncInferenceClient(base_url=server.url) as hub:
                return await asyncio.gather(*(hub.text_generation(PROMPT, **SEEDED) for _ in range(8)))

        assert len(set(asyncio.run(ask_all()))) == 1


class TestRoutes:
    def test_generate(self, http):
        document = good(ask(http, max_new_tokens=4))
        assert list(document) == ["generated_text"]

    def test_the_root_answers_with_a_list(self, http):
        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 4}}
        (document,) = good(http.post("/", json=body))
        assert document == good(http.post("/generate", json=body))

    def test_the_root_streams_when_asked(self, http):
        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 4}, "stream": True}
        response = http.post("/", json=body)
        assert response.headers["content-type"].startswith("text/event-stream")
        assert len(events(response)) == 4

    def test_info(self, http, server):
        info = good(http.get("/info"))
        assert info["model_id"] == "smollm2:135m"
        assert info["max_total_tokens"] == 2048
        assert info["max_input_tokens"] == 2047

    def test_root_says_who_it_is(self, http):
        assert good(http.get("/"))["server"] == "quire"

    def test_defaults(self, http):
        document = good(ask(http, details=True))
        assert document["details"]["generated_tokens"] <= 100
        assert document["details"]["seed"] is None

    def test_a_default_answer_fits_into_what_is_left(self):
        assert Parameters().sampling_params({}, stream=False, room=7).max_tokens == 7
        assert Parameters().sampling_params({}, stream=False, room=2000).max_tokens == 100


class TestParameters:
    def test_greedy_is_the_default_and_a_temperature_samples(self, http):
        greedy = good(ask(http, max_new_tokens=16))
        assert greedy == good(ask(http, max_new_tokens=16, seed=3, temperature=1.0))
        assert greedy != good(ask(http, max_new_tokens=16, seed=3, temperature=1.5))

    def test_seed(self, http):
        first = good(ask(http, **SEEDED))
        assert first == good(ask(http, **SEEDED))
        assert first != good(ask(http, **{**SEEDED, "seed": 12}))

    def test_a_drawn_seed_is_told_and_gives_the_same_answer(self, http):
        first = good(ask(http, do_sample=True, max_new_tokens=12, details=True))
        again = good(ask(http, do_sample=True, max_new_tokens=12, details=True, seed=first["details"]["seed"]))
        assert again == first

    def test_return_full_text(self, http):
        answer = good(ask(http, max_new_tokens=6))["generated_text"]
        assert good(ask(http, max_new_tokens=6, return_full_text=True))["generated_text"] == PROMPT + answer
        last = events(ask(http, "/generate_stream", max_new_tokens=6, return_full_text=True))[-1]
        assert last["generated_text"] == PROMPT + answer

    def test_stop_sequence_ends_the_answer_and_is_in_it(self, http):
        plain = good(ask(http, max_new_tokens=24))["generated_text"]
        stop = plain[9:14]
        document = good(ask(http, max_new_tokens=24, stop=[stop], details=True))
        text = document["generated_text"]
        assert text == plain[: plain.index(stop) + len(stop)]
        assert document["details"]["finish_reason"] == "stop_sequence"
        assert "".join(token["text"] for token in document["details"]["tokens"]) == text
        streamed = events(ask(http, "/generate_stream", max_new_tokens=24, stop=[stop], details=True))
        assert [event["token"] for event in streamed] == document["details"]["tokens"]
        assert streamed[-1]["generated_text"] == text
        assert streamed[-1]["details"]["finish_reason"] == "stop_sequence"

    def test_the_end_token_is_special_and_has_no_text(self, http):
        prompt = "<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n"
        document = good(ask(http, inputs=prompt, max_new_tokens=200, details=True))
        details = document["details"]
        assert details["finish_reason"] == "eos_token"
        last = details["tokens"][-1]
        assert last["special"]
        assert last["text"] == ""
        assert "".join(token["text"] for token in details["tokens"]) == document["generated_text"]

    def test_top_tokens(self, http):
        document = good(ask(http, max_new_tokens=5, top_n_tokens=3, details=True))
        details = document["details"]
        assert [len(top) for top in details["top_tokens"]] == [3] * 5
        for token, top in zip(details["tokens"], details["top_tokens"], strict=True):
            assert top[0]["id"] == token["id"]  # the answer is greedy
            assert [one["logprob"] for one in top] == sorted((one["logprob"] for one in top), reverse=True)
        streamed = events(ask(http, "/generate_stream", max_new_tokens=5, top_n_tokens=3))
        assert [event["top_tokens"] for event in streamed] == details["top_tokens"]

    def test_top_k_of_one_is_greedy(self, http):
        assert good(ask(http, max_new_tokens=8, top_k=1, seed=5)) == good(ask(http, max_new_tokens=8))

    def test_repetition_penalty(self, http):
        inputs = "one two one two one two one"
        plain = good(ask(http, inputs=inputs, max_new_tokens=12))
        assert plain != good(ask(http, inputs=inputs, max_new_tokens=12, repetition_penalty=2.0))

    def test_truncate_keeps_the_last_tokens(self, http):
        short = good(ask(http, inputs=" of France is", max_new_tokens=8, decoder_input_details=True))
        cut = good(ask(http, max_new_tokens=8, decoder_input_details=True, truncate=3))
        assert [token["text"] for token in cut["details"]["prefill"]] == [" of", " France", " is"]
        assert cut == short

    def test_truncate_makes_a_long_text_fit(self, http):
        assert ask(http, inputs="word " * 4000, max_new_tokens=4).status_code == 422
        response = ask(http, inputs="word " * 4000, max_new_tokens=4, truncate=100)
        assert good(response)
        assert response.headers["x-prompt-tokens"] == "100"

    def test_best_of(self, http):
        document = good(ask(http, max_new_tokens=10, do_sample=True, best_of=4, details=True, seed=2))
        best = document["details"]
        others = best["best_of_sequences"]
        assert len(others) == 3
        assert len({best["seed"], *(other["seed"] for other in others)}) == 4
        assert all(mean(best) >= mean(other) for other in others)
        for sequence in (document | best, *others):
            alone = good(ask(http, max_new_tokens=10, do_sample=True, seed=sequence["seed"], details=True))
            assert alone["generated_text"] == sequence["generated_text"]
            assert alone["details"]["tokens"] == sequence["tokens"]

    def test_regex_grammar(self, http):
        text = good(ask(http, max_new_tokens=20, grammar={"type": "regex", "value": "[0-9]{4}"}))["generated_text"]
        assert len(text) == 4
        assert text.isdecimal()

    @pytest.mark.parametrize("kind", ["json", "json_schema"])
    def test_json_grammar(self, http, kind):
        schema = {
            "type": "object",
            "properties": {"year": {"type": "integer", "minimum": 0, "maximum": 9999}},
            "required": ["year"],
            "additionalProperties": False,
        }
        value = schema if kind == "json" else {"name": "date", "schema": schema}
        document = good(ask(http, max_new_tokens=60, grammar={"type": kind, "value": value}))
        assert isinstance(json.loads(document["generated_text"])["year"], int)


def mean(details: dict[str, Any]) -> float:
    return sum(token["logprob"] for token in details["tokens"]) / len(details["tokens"])


class TestHeaders:
    def test_times_and_counts(self, http):
        response = ask(http, max_new_tokens=6)
        assert good(response)
        headers = response.headers
        total, *parts = (int(headers[f"x-{name}-time"]) for name in TIMES)
        assert abs(total - sum(parts)) <= 2  # each is rounded
        assert abs(float(headers["x-compute-time"]) * 1000 - total) <= 1
        assert headers["x-compute-type"] == "cpu"
        assert headers["x-compute-characters"] == str(len(PROMPT))
        assert headers["x-prompt-tokens"] == "5"
        assert headers["x-generated-tokens"] == "6"
        assert int(headers["x-time-per-token"]) <= int(headers["x-inference-time"])

    def test_a_stream_says_what_it_knows(self, http):
        headers = ask(http, "/generate_stream", max_new_tokens=2).headers
        assert headers["x-compute-characters"] == str(len(PROMPT))
        assert headers["x-compute-type"] == "cpu"

    def test_request_id(self, http):
        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 1}}
        response = http.post("/generate", json=body, headers={"x-request-id": "mine-1"})
        assert response.headers["x-request-id"] == "mine-1"


class TestRefusals:
    @pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
    @pytest.mark.parametrize(
        ("parameters", "word"),
        [
            ({"typical_p": 0.9}, "typical_p"),
            ({"watermark": True}, "watermark"),
            ({"adapter_id": "mine"}, "adapter_id"),
            ({"best_of": 2}, "best_of"),
            ({"best_of": 1000, "do_sample": True}, "best_of"),
            ({"temperature": 0}, "temperature"),
            ({"temperature": "hot"}, "temperature"),
            ({"top_p": 1.5}, "top_p"),
            ({"top_k": -1}, "top_k"),
            ({"repetition_penalty": 0}, "repetition_penalty"),
            ({"frequency_penalty": 9}, "frequency_penalty"),
            ({"max_new_tokens": 0}, "max_new_tokens"),
            ({"max_new_tokens": 5000}, "max_new_tokens is 5,000"),
            ({"top_k": 2**70}, "top_k"),
            ({"truncate": 0}, "truncate"),
            ({"seed": -1}, "seed"),
            ({"stop": [""]}, "stop"),
            ({"stop": ["x"] * 100}, "stop"),
            ({"top_n_tokens": 1000}, "top_n_tokens"),
            ({"max_tokens": 5}, "max_tokens"),
            ({"details": "yes"}, "details"),
            ({"grammar": {"type": "lark", "value": "x"}}, "grammar"),
            ({"grammar": {"type": "json_schema", "value": {}}}, "schema"),
        ],
        ids=lambda value: value if isinstance(value, str) else None,
    )
    def test_wrong_parameters(self, http, path, parameters, word):
        response = http.post(path, json={"inputs": PROMPT, "parameters": parameters})
        assert response.status_code == 422
        document = response.json()
        assert set(document) == {"error", "error_type"}
        assert document["error_type"] == "validation"
        assert word in document["error"]

    def test_values_that_change_nothing_are_fine(self, http):
        assert good(ask(http, max_new_tokens=2, typical_p=1.0, watermark=False, best_of=1, adapter_id=None))

    @pytest.mark.parametrize("name", ["best_of", "decoder_input_details"])
    def test_what_a_stream_cannot_have(self, http, name):
        response = ask(http, "/generate_stream", do_sample=True, **{name: 2 if name == "best_of" else True})
        assert response.status_code == 422
        assert name in response.json()["error"]

    @pytest.mark.parametrize(
        "body", [b"", b"{", b"[]", b'{"inputs": 5}', b'{"inputs": ""}', b'{"inputs": "\\ud800"}', b'{"input": "x"}']
    )
    def test_wrong_bodies(self, http, body):
        response = http.post("/generate", content=body, headers={"content-type": "application/json"})
        assert response.status_code == 422
        assert response.json()["error_type"] == "validation"

    def test_a_bad_grammar(self, http):
        response = ask(http, max_new_tokens=2, grammar={"type": "regex", "value": "("})
        assert response.status_code == 422
        assert response.json()["error_type"] == "validation"


class TestDisconnects:
    @pytest.mark.parametrize("path", ["/generate_stream", "/generate"])
    def test_a_client_that_goes_frees_its_request(self, server, http, path):
        """So hot that the answer does not end by itself."""
        parameters = {"max_new_tokens": 2000, "do_sample": True, "temperature": 50.0, "seed": 1}
        with connect(server) as leaving:
            leaving.sendall(wire(path, {"inputs": PROMPT, "parameters": parameters}))
            wait_for(lambda: gauge(http, "running") == 1)
            if path == "/generate_stream":
                assert leaving.recv(1000).startswith(b"HTTP/1.1 200")
        wait_for(lambda: gauge(http, "running") == 0)
        assert good(ask(http, max_new_tokens=2))


def test_a_full_queue_says_when_to_come_back(default_model):
    endless = {"max_new_tokens": 1000, "do_sample": True, "temperature": 50.0, "seed": 1}
    options = ("--max-len", "2048", "--kv-memory", "1", "--max-requests", "1", "--max-queue-requests", "1")
    with Running(*options) as server, server.client() as http, connect(server) as first, connect(server) as second:
        for connection in (first, second):
            connection.sendall(wire("/generate", {"inputs": PROMPT, "parameters": endless}))
        wait_for(lambda: gauge(http, "running") + gauge(http, "waiting") == 2)
        for path in ("/generate", "/generate_stream"):
            response = ask(http, path, max_new_tokens=1)
            assert response.status_code == 429
            assert response.json()["error_type"] == "overloaded"
            assert int(response.headers["retry-after"]) >= 1


def connect(server: Running) -> socket.socket:
    url = httpx2.URL(server.url)
    return socket.create_connection((url.host, url.port))


def wire(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = ["host: x", "content-type: application/json", f"content-length: {len(content)}"]
    return "\r\n".join([f"POST {path} HTTP/1.1", *head, "", ""]).encode() + content


def gauge(http: httpx2.Client, name: str) -> int:
    page = http.get("/metrics").text
    (line,) = (line for line in page.splitlines() if line.startswith(f"quire_requests_{name} "))
    return int(float(line.split()[1]))
