"""What a model's server refuses, and how it says so."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.server

HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "word " * 600_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 600_000}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "word " * 600_000}], "max_tokens": 4}),
        ("/generate", {"inputs": "word " * 600_000}),
    ],
)
def test_a_prompt_that_cannot_fit_is_refused_before_it_is_encoded(server, path, body):
    with server.client() as http:
        answer = http.post(path, json=body)
        assert answer.status_code in (400, 422)
        assert "which are at least" in answer.text
        assert http.post("/v1/completions", json={"prompt": [5] * 5000}).status_code == 400


@pytest.mark.parametrize(
    ("restrictions", "words"),
    [
        ({"guided_regex": "a+", "allowed_token_ids": [5]}, "structured_outputs and allowed_token_ids together leave"),
        ({"guided_choice": ["a"], "min_tokens": 4}, "structured_outputs and min_tokens together leave"),
        ({"guided_choice": ["a"], "bad_words": ["a"]}, "structured_outputs and bad_words together leave"),
        ({"guided_regex": "a", "guided_grammar": "b"}, "guided_regex and guided_grammar"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "regex and grammar"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "ask for one of the two"),
    ],
)
def test_restrictions_that_leave_no_token_are_the_clients_mistake(server, restrictions, words):
    with server.client() as http:
        answer = http.post("/v1/chat/completions", json={**HELLO, **restrictions})
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert words in answer.json()["error"]["message"]


def test_a_forced_call_that_is_cut_leaves_nothing_in_the_content(server):
    for max_tokens in (1, 2, 4, 8):
        with server.client() as http:
            body = {**HELLO, "tools": TOOLS, "tool_choice": "required", "max_tokens": max_tokens}
            (choice,) = http.post("/v1/chat/completions", json=body).json()["choices"]
        assert choice["finish_reason"] == "length"
        assert not choice["message"]["content"]


def test_one_call_cannot_ask_for_more_than_the_queue_holds(server):
    with server.client() as http:
        answer = http.post("/v1/completions", json={"prompt": ["x"] * 100, "n": 256, "max_tokens": 1})
        assert answer.status_code == 400
        assert "25,600 answers" in answer.json()["error"]["message"]


def test_range_errors_name_their_field(server):
    with server.client() as http:
        for field, value in (("temperature", 300), ("n", 0), ("max_tokens", 100_000), ("logprobs", 99)):
            answer = http.post("/v1/completions", json={"prompt": "x", field: value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_wrong_methods(server):
    with server.client() as http:
        assert http.head("/health").status_code == 200
        assert http.head("/ready").status_code == 200
        assert http.put("/v1/responses/resp_x").headers["allow"] == "DELETE, GET"
        assert http.get("/v1/completions").headers["allow"] == "POST"
