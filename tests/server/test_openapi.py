"""The server's own OpenAPI: every route says what it answers, and answers so."""

from __future__ import annotations

import jsonschema
import pytest
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

pytestmark = pytest.mark.server

HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
TEXT = {"prompt": "hello", "max_tokens": 2}
CALLS = [
    ("get", "/health", None),
    ("get", "/ready", None),
    ("get", "/health/generate", None),
    ("get", "/v1/models", None),
    ("get", "/info", None),
    ("get", "/", None),
    ("post", "/v1/completions", TEXT),
    ("post", "/v1/completions", {**TEXT, "logprobs": 2, "return_token_ids": True}),
    ("post", "/v1/chat/completions", HELLO),
    ("post", "/v1/responses", {"input": "hello", "max_output_tokens": 16}),
    ("post", "/v1/messages", HELLO),
    ("post", "/v1/messages/count_tokens", {"messages": HELLO["messages"]}),
    ("post", "/tokenize", {"prompt": "hello"}),
    ("post", "/tokenize", {"inputs": "hello"}),
    ("post", "/detokenize", {"tokens": [5, 6]}),
    ("post", "/apply-template", {"messages": HELLO["messages"]}),
    ("post", "/chat_tokenize", HELLO),
    ("post", "/generate", {"inputs": "hello", "parameters": {"max_new_tokens": 2}}),
    ("post", "/", {"inputs": "hello", "parameters": {"max_new_tokens": 2}}),
    ("post", "/v1/completions", {"prompt": 5}),
    ("post", "/v1/messages", {}),
    ("post", "/generate", {}),
    ("post", "/tokenize", {}),
]


@pytest.fixture(scope="module")
def api(server):
    with server.client() as http:
        return http.get("/openapi.json").json()


def test_every_route_says_what_it_answers(api):
    for path, operations in api["paths"].items():
        for method, operation in operations.items():
            for status in ("200", "4XX", "5XX"):
                content = operation["responses"][status]["content"]
                assert all(one["schema"] for one in content.values()), (method, path, status)
            assert "422" not in operation["responses"]


def test_a_route_that_only_streams_has_no_document(api):
    for path in ("/generate_stream", "/console/batching/run"):
        content = api["paths"][path]["post"]["responses"]["200"]["content"]
        assert list(content) == ["text/event-stream"]


@pytest.mark.parametrize(("method", "path", "body"), CALLS)
def test_answers_are_as_they_are_described(server, api, method, path, body):
    with server.client() as http:
        answer = http.request(method, path, json=body)
    status = "200" if answer.status_code == 200 else f"{answer.status_code // 100}XX"
    schema = api["paths"][path][method]["responses"][status]["content"]["application/json"]["schema"]
    registry = Registry().with_resource("urn:api", Resource.from_contents(api, default_specification=DRAFT202012))
    whole = {"$id": "urn:one", "components": api["components"], **schema}
    jsonschema.Draft202012Validator(whole, registry=registry).validate(answer.json())
