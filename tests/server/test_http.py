"""How errors look and what the routes have in common. No model: whatever gets past the checks finds none loaded."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from starlette.requests import Request
from starlette.testclient import TestClient

from quire.errors import InvalidParams, Overloaded
from quire.server.admission import Admission
from quire.server.app import allowed_methods, build_app
from quire.server.auth import ApiKeys
from quire.server.config import ServerConfig
from quire.server.metrics import Metrics
from quire.server.openai.protocol import ChatCompletionRequest, CompletionRequest
from quire.server.request_model import MAX_ERRORS, explain_validation_error

pytestmark = pytest.mark.cpu

PAGE = "https://page.example"


def client(keys=None, **config):
    middleware = build_app(ServerConfig(log_requests=False, **config), ApiKeys(keys or {}), Metrics())
    return TestClient(middleware, raise_server_exceptions=False)


def mistake(model, body):
    """What is wrong with a body: the sentence, and the field."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    problem = explain_validation_error(caught.value.errors(), body)
    return str(problem), problem.param


def test_errors_of_the_server_itself_carry_cors_headers():
    http = client({"ann": "ann-secret"}, cors_origins=PAGE, max_body_bytes=100)
    ann = {"authorization": "Bearer ann-secret"}
    for headers, body, status in (({}, b"", 401), (ann, b"", 503), (ann, b"a" * 200, 503)):
        answer = http.post("/v1/completions", content=body, headers={"origin": PAGE, **headers})
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "retry-after" in answer.headers["access-control-expose-headers"]
    too_large = http.post("/health", content=b"a" * 200, headers={"origin": PAGE})
    assert (too_large.status_code, too_large.headers["access-control-allow-origin"]) == (413, PAGE)
    other = http.post("/v1/completions", headers={"origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers


def test_a_wrong_method_is_told_the_right_ones():
    http = client()
    refused = http.delete("/health")
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")
    assert "DELETE /health" in refused.json()["error"]["message"]


def test_methods_are_those_of_the_routes_that_are_served():
    for console, path, methods in (
        (True, "/openapi.json", {"GET"}),
        (True, "/console/live", {"GET"}),
        (False, "/console/live", set()),
    ):
        app = build_app(ServerConfig(log_requests=False, console=console), ApiKeys({}), Metrics()).app
        assert allowed_methods(Request({"type": "http", "method": "PUT", "path": path, "app": app})) == methods


@pytest.mark.parametrize(("path", "status"), [("/health", 200), ("/ready", 503)])
def test_health_routes_answer_head(path, status):
    assert client().head(path).status_code == status


@pytest.mark.parametrize("field", ["temperature", "top_p", "presence_penalty", "min_p"])
@pytest.mark.parametrize("value", [True, "0.5"])
def test_numbers_are_numbers(field, value):
    assert mistake(CompletionRequest, {"prompt": "x", field: value}) == (f"{field}: give a number.", field)
    assert CompletionRequest.model_validate({"prompt": "x", field: 1}).sampling_params({})


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"prompt": 5}, "prompt: give a string or an array.", "prompt"),
        ({"prompt": ["a", 5]}, "prompt.1: give a string.", "prompt.1"),
        ({"prompt": "x", "stream": "yes"}, "stream: give true or false.", "stream"),
        ({"prompt": "x", "stop": {}}, "stop: give a string or an array.", "stop"),
        ({"prompt": "x", "n": 1.5}, "n: give a whole number.", "n"),
        ({"prompt": "x", "suffix": "y"}, "suffix: give null.", "suffix"),
        ({"prompt": "x", "stream_options": []}, "stream_options: give an object.", "stream_options"),
        ({}, "prompt is missing; it is required.", "prompt"),
    ],
)
def test_mistakes_are_told_in_the_words_of_json(body, message, param):
    assert mistake(CompletionRequest, body) == (message, param)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", 300, "temperature is 300.0; give a number from 0 to 100."),
        ("n", 0, "n is 0; give a whole number from 1 to 256."),
        ("stop", [""], 'stop holds [""]; give texts, none of them empty.'),
        ("structured_outputs", {"json": None, "regex": 5}, "structured_outputs.regex holds 5; give a text"),
        ("structured_outputs", {"json_object": "x"}, 'structured_outputs.json_object is "x"; give true or false.'),
    ],
)
def test_what_is_out_of_range_is_named(field, value, message):
    with pytest.raises(InvalidParams) as caught:
        CompletionRequest.model_validate({"prompt": "x", field: value}).sampling_params({})
    assert str(caught.value).startswith(message)
    assert caught.value.param is not None
    assert caught.value.param.startswith(field)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": [], **{f"key{number}": 1 for number in range(1000)}}, "key0: quire does not know"),
        (
            {"messages": [], "stream_options": {f"key{number}": 1 for number in range(1000)}},
            "stream_options.key0: quire does not know",
        ),
        (
            {"messages": [], "logit_bias": {str(number): "x" for number in range(1000)}},
            f"more than {MAX_ERRORS} values are wrong",
        ),
        ({"messages": [5] * 1000}, "messages.0: give an object."),
    ],
)
def test_a_thousand_mistakes_are_not_listed_one_by_one(body, words):
    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest.model_validate(body)
    assert caught.value.error_count() <= MAX_ERRORS
    assert words in str(explain_validation_error(caught.value.errors(), body))


def test_one_call_cannot_be_larger_than_the_queue():
    admission = Admission(max_running=2, max_queue_requests=2, max_queue_tokens=100)
    for num_requests, num_tokens in ((5, 10), (1, 101)):
        with pytest.raises(InvalidParams, match="at most 4 answers and 100 prompt tokens"):
            admission.check(num_requests, num_tokens)
    with admission.admit(4, 100), pytest.raises(Overloaded):
        admission.check(1, 1)
