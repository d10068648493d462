"""The documents that routes answer with, as OpenAPI describes them. Routes write them by hand; a test compares both."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Responses = dict[int | str, dict[str, Any]]


class Document(BaseModel):
    """Fields that depend on the request may come beside those that are listed."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class ErrorDetail(Document):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Document):
    """OpenAI's form of an error."""

    error: ErrorDetail


class AnthropicErrorDetail(Document):
    type: str
    message: str


class AnthropicError(Document):
    type: Literal["error"]
    error: AnthropicErrorDetail


class TGIError(Document):
    error: str
    error_type: str


class Status(Document):
    status: str


class ServerInfo(Document):
    server: str
    version: str
    model: str
    api: str


class ModelCard(Document):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Document):
    object: Literal["list"]
    data: list[ModelCard]


class Usage(Document):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(Document):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: int | str | None


class Completion(Document):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class FunctionCall(Document):
    name: str
    arguments: str


class ToolCall(Document):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(Document):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Document):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class ChatCompletion(Document):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ResponseDocument(Document):
    id: str
    object: Literal["response"]
    created_at: int
    status: str
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None


class DeletedResponse(Document):
    id: str
    object: Literal["response"]
    deleted: bool


class ItemList(Document):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


class AnthropicMessage(Document):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, Any]


class TokenCount(Document):
    input_tokens: int


class Tokens(Document):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class TokenSpan(Document):
    id: int
    text: str
    start: int
    stop: int


class TemplatedTokens(Document):
    tokenize_response: list[TokenSpan]
    templated_text: str


class PromptText(Document):
    prompt: str


class GeneratedText(Document):
    generated_text: str


class TGIInfo(Document):
    model_id: str
    model_device_type: str
    max_concurrent_requests: int
    max_best_of: int
    max_input_tokens: int
    max_total_tokens: int
    version: str


def answers(document: Any, *, error: type[Document] = ErrorBody, stream: bool = False) -> Responses:
    """What a route answers: a document, or events if the request asks for a stream; and its errors."""
    success: dict[str, Any] = {"model": document, "description": "The answer."}
    if stream:
        success["description"] = "The answer, or its events if `stream` is true."
        success["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    refused = {"model": error, "description": "The request is wrong, or refused for now."}
    return {200: success, "4XX": refused, "5XX": {"model": error, "description": "The server failed."}}


def only_text(media_type: str, *, error: type[Document] = ErrorBody) -> Responses:
    """A route that answers with text, not with a document."""
    success = {"description": "The answer.", "content": {media_type: {"schema": {"type": "string"}}}}
    return {**answers(error, error=error), 200: success}
