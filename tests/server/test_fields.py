"""What request bodies say, in every dialect: defaults, nulls, and fields that change nothing."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from quire.core.params import SamplingParams
from quire.errors import InvalidParams
from quire.server.anthropic.protocol import MessagesRequest
from quire.server.openai import chat, completions
from quire.server.openai.protocol import NO_EFFECT, ChatCompletionRequest, CompletionRequest
from quire.server.openai.responses.protocol import ResponsesRequest
from quire.server.tgi.protocol import CompatGenerateRequest

pytestmark = pytest.mark.cpu

MODELS = {"temperature": 0.3, "top_p": 0.8, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}
MESSAGES = [{"role": "user", "content": "hi"}]


def completion(fields: dict[str, Any]) -> SamplingParams:
    return completions.sampling_params(CompletionRequest.model_validate({"prompt": "hi", **fields}), MODELS)


def chat_completion(fields: dict[str, Any]) -> SamplingParams:
    return chat.sampling_params(ChatCompletionRequest.model_validate({"messages": MESSAGES, **fields}), MODELS, {})


def response(fields: dict[str, Any]) -> SamplingParams:
    return ResponsesRequest.model_validate({"input": "hi", **fields}).sampling_params(MODELS)


def message(fields: dict[str, Any]) -> SamplingParams:
    return MessagesRequest.model_validate({"messages": MESSAGES, "max_tokens": 5, **fields}).sampling_params(MODELS)


def tgi(fields: dict[str, Any]) -> SamplingParams:
    body = CompatGenerateRequest.model_validate({"inputs": "hi", "parameters": {"do_sample": True, **fields}})
    return body.parameters.sampling_params(MODELS, stream=False, room=100)


DIALECTS = [completion, chat_completion, response, message, tgi]


def sampled(params: SamplingParams) -> dict[str, float]:
    return {name: getattr(params, name) for name in MODELS}


@pytest.mark.parametrize("read", DIALECTS)
def test_what_a_request_does_not_say_is_the_models(read) -> None:
    assert sampled(read({})) == MODELS


@pytest.mark.parametrize("read", DIALECTS)
def test_what_a_request_says_wins(read) -> None:
    said = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    assert sampled(read(said)) == MODELS | said


@pytest.mark.parametrize("read", DIALECTS)
def test_a_null_is_not_said(read) -> None:
    assert read({"temperature": None, "top_p": None, "top_k": None, "seed": None}) == read({})


def test_tgi_draws_only_when_it_is_told_to() -> None:
    greedy = CompatGenerateRequest.model_validate({"inputs": "hi"}).parameters.sampling_params(
        MODELS, stream=False, room=100
    )
    assert greedy.greedy
    assert greedy.repetition_penalty == MODELS["repetition_penalty"]


REQUESTS: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (CompletionRequest, {"prompt": "hi"}),
    (ChatCompletionRequest, {"messages": MESSAGES}),
    (ResponsesRequest, {"input": "hi"}),
    (MessagesRequest, {"messages": MESSAGES, "max_tokens": 5}),
    (CompatGenerateRequest, {"inputs": "hi"}),
]


@pytest.mark.parametrize(("model", "required"), REQUESTS, ids=lambda value: getattr(value, "__name__", ""))
def test_every_field_may_be_null_but_those_that_must_be_there(model, required) -> None:
    names = [field.alias or name for name, field in model.model_fields.items()]
    body = dict.fromkeys(names) | required
    assert model.model_validate(body) == model.model_validate(required)
    for name in required:
        with pytest.raises(ValidationError, match="missing"):
            model.model_validate({**required, name: None})


def test_nulls_inside_objects_are_not_said_either() -> None:
    options = {"include_usage": None, "continuous_usage_stats": None, "include_obfuscation": None}
    body = ChatCompletionRequest.model_validate({"messages": MESSAGES, "stream_options": options})
    assert body.stream_options is not None
    assert not body.stream_options.include_usage


TAKEN: dict[str, Any] = {
    "user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "x",
    "prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "auto"},
    "stream_options": {"include_obfuscation": True},
}  # fmt: skip


@pytest.mark.parametrize("read", [completion, chat_completion, response])
def test_fields_that_change_nothing_are_taken(read) -> None:
    assert read(TAKEN) == read({})


def test_they_are_all_tried_here() -> None:
    assert set(TAKEN) == {*NO_EFFECT, "stream_options"}


@pytest.mark.parametrize("parallel", [True, False])
def test_parallel_calls_may_be_spoken_of_where_there_are_no_tools(parallel) -> None:
    assert chat_completion({"parallel_tool_calls": parallel}) == chat_completion({})


def test_a_field_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValidationError, match="frobnicate"):
        completion({"frobnicate": 1})


@pytest.mark.parametrize("key", ["9" * 5000, "٣", "-1", "1.0", ""])
def test_keys_of_a_bias_are_token_ids(key: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        completion({"logit_bias": {key: 1}})
    assert caught.value.param == "logit_bias"
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("dialect", [completion, chat_completion])
def test_log_probabilities_of_a_prompt_are_bounded(dialect: Any) -> None:
    assert dialect({"prompt_logprobs": 20}).prompt_logprobs == 20
    with pytest.raises(InvalidParams, match="prompt_logprobs is 1000; give a whole number from 0 to 20"):
        dialect({"prompt_logprobs": 1000})


@pytest.mark.parametrize("dialect", [completion, chat_completion, response])
def test_a_top_k_of_minus_one_keeps_all(dialect: Any) -> None:
    assert dialect({"top_k": -1}).top_k == 0
