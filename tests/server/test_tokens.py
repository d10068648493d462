"""Tokens without an answer: /tokenize in both its forms, /detokenize, /apply-template, /chat_tokenize."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tests.server.running import Running

pytestmark = pytest.mark.server

TEXTS = ["Hello, world!", " leading space", "Grüße 👋🏽 日本語", "a\n\n\tb", "<|im_start|>user", "x" * 20_000]
MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi!"}]


@pytest.fixture(scope="module")
def http(server: Running):
    with server.client() as client:
        yield client


def post(http: httpx2.Client, path: str, body: Any) -> Any:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def refused(http: httpx2.Client, path: str, body: Any) -> str:
    response = http.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error["message"]


class TestTokenize:
    @pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
    def test_there_and_back(self, http, text):
        document = post(http, "/tokenize", {"prompt": text})
        assert document["count"] == len(document["tokens"]) > 0
        assert document["max_model_len"] == 2048
        assert document["token_strs"] is None
        assert post(http, "/detokenize", {"tokens": document["tokens"]}) == {"prompt": text}

    def test_token_strings(self, http):
        document = post(http, "/tokenize", {"prompt": "Hello world", "return_token_strs": True})
        assert document["token_strs"] == ["Hello", "Ġworld"]

    def test_a_prompt_is_what_completions_count(self, http):
        tokens = post(http, "/tokenize", {"prompt": "One two three"})["tokens"]
        answer = post(http, "/v1/completions", {"prompt": "One two three", "max_tokens": 1})
        assert answer["usage"]["prompt_tokens"] == len(tokens)

    def test_messages_are_what_chat_completions_count(self, http):
        tokens = post(http, "/tokenize", {"messages": MESSAGES})["tokens"]
        answer = post(http, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1})
        assert answer["usage"]["prompt_tokens"] == len(tokens)

    def test_tools_are_what_chat_completions_count(self, http):
        tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
        body = {"messages": MESSAGES, "tools": [tool]}
        num_tokens = post(http, "/tokenize", body)["count"]
        assert num_tokens > post(http, "/tokenize", {"messages": MESSAGES})["count"]
        assert len(post(http, "/chat_tokenize", body)["tokenize_response"]) == num_tokens
        answer = post(http, "/v1/chat/completions", {**body, "max_tokens": 1})
        assert answer["usage"]["prompt_tokens"] == num_tokens

    def test_messages_are_the_tokens_of_the_applied_template(self, http):
        text = post(http, "/apply-template", {"messages": MESSAGES})["prompt"]
        tokens = post(http, "/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
        assert post(http, "/tokenize", {"messages": MESSAGES})["tokens"] == tokens

    def test_the_next_turn_may_be_left_closed(self, http):
        opened = post(http, "/tokenize", {"messages": MESSAGES})["count"]
        assert post(http, "/tokenize", {"messages": MESSAGES, "add_generation_prompt": False})["count"] < opened

    def test_the_model_may_be_named(self, http):
        assert post(http, "/tokenize", {"model": "smollm2:135m", "prompt": "x"})
        assert http.post("/tokenize", json={"model": "another", "prompt": "x"}).status_code == 404


class TestSpans:
    """TGI's form."""

    @pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
    def test_the_same_tokens_with_their_places(self, http, text):
        spans = post(http, "/tokenize", {"inputs": text})
        assert [span["id"] for span in spans] == post(http, "/tokenize", {"prompt": text})["tokens"]
        assert all(span["text"] == text[span["start"] : span["stop"]] for span in spans)
        assert (spans[0]["start"], spans[-1]["stop"]) == (0, len(text))

    def test_chat(self, http):
        document = post(http, "/chat_tokenize", {"messages": MESSAGES})
        assert document["templated_text"] == post(http, "/apply-template", {"messages": MESSAGES})["prompt"]
        ids = [span["id"] for span in document["tokenize_response"]]
        assert ids == post(http, "/tokenize", {"messages": MESSAGES})["tokens"]

    def test_a_chat_that_no_template_takes_is_refused_as_tgi_does(self, http):
        response = http.post("/chat_tokenize", json={"messages": []})
        assert response.status_code == 422
        assert response.json()["error_type"] == "validation"


class TestTemplate:
    def test_the_prompt(self, http):
        prompt = post(http, "/apply-template", {"messages": MESSAGES})["prompt"]
        assert prompt == (
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_without_the_next_turn(self, http):
        body = {"messages": MESSAGES, "add_generation_prompt": False}
        assert post(http, "/apply-template", body)["prompt"].endswith("Hi!<|im_end|>\n")

    def test_a_template_of_ones_own_is_refused(self, http):
        assert "chat_template" in refused(http, "/apply-template", {"messages": MESSAGES, "chat_template": "x"})


class TestRefusals:
    @pytest.mark.parametrize(
        ("body", "word"),
        [
            ({}, "exactly one"),
            ({"prompt": "x", "inputs": "x"}, "prompt and inputs"),
            ({"prompt": "x", "messages": MESSAGES}, "prompt and messages"),
            ({"prompt": 5}, "prompt"),
            ({"prompt": ["x"]}, "prompt"),
            ({"prompt": "x", "add_generation_prompt": False}, "add_generation_prompt"),
            ({"inputs": "x", "return_token_strs": True}, "return_token_strs"),
            ({"prompt": "x", "add_special_token": True}, "add_special_token"),
            ({"messages": []}, "messages"),
            ({"messages": [{"content": "x"}]}, "role"),
        ],
        ids=lambda value: value if isinstance(value, str) else None,
    )
    def test_tokenize(self, http, body, word):
        assert word in refused(http, "/tokenize", body)

    @pytest.mark.parametrize(
        ("tokens", "word"),
        [([-1], "-1"), ([10**9], "1000000000"), (["x"], "tokens"), ([True], "tokens"), (5, "tokens")],
    )
    def test_detokenize(self, http, tokens, word):
        assert word in refused(http, "/detokenize", {"tokens": tokens})

    def test_apply_template_needs_messages(self, http):
        assert "messages" in refused(http, "/apply-template", {})

    @pytest.mark.parametrize("field", ["prompt", "inputs"])
    def test_half_a_character(self, http, field):
        headers = {"content-type": "application/json"}
        response = http.post("/tokenize", content=f'{{"{field}": "a\\ud800b"}}'.encode(), headers=headers)
        assert response.status_code == 400

    @pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "self"])
    def test_variables_that_are_fields(self, http, name):
        body = {"messages": MESSAGES, "chat_template_kwargs": {name: None}}
        assert name in refused(http, "/apply-template", body)

    def test_half_a_character_in_a_conversation(self, http):
        body = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
        headers = {"content-type": "application/json"}
        for path, status in (("/tokenize", 400), ("/apply-template", 400), ("/chat_tokenize", 422)):
            assert http.post(path, content=body, headers=headers).status_code == status


def test_no_tokens_are_no_text(http):
    assert post(http, "/detokenize", {"tokens": []}) == {"prompt": ""}
    assert post(http, "/tokenize", {"prompt": ""})["tokens"] == []
