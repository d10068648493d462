"""OpenAPI schemas of the responses. Routes write their documents by hand; a test compares both."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Responses = dict[int | str, dict[str, Any]]


class Schema(BaseModel):
    """A document may have more fields than its schema: those that depend on the request."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class ErrorDetail(Schema):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Schema):
    """An error of OpenAI's API."""

    error: ErrorDetail


class AnthropicErrorDetail(Schema):
    type: str
    message: str


class AnthropicError(Schema):
    type: Literal["error"]
    error: AnthropicErrorDetail


class TGIError(Schema):
    error: str
    error_type: str


class Status(Schema):
    status: str


class Replica(Schema):
    replica: int
    ready: bool
    draining: bool | None = None
    answers: int | None = None
    waiting_prompt_tokens: int | None = None
    cached_blocks: int | None = None
    seconds_per_prompt_token: float | None = None
    seconds_per_step: float | None = None


class ReplicaList(Schema):
    replicas: list[Replica]


class Drained(Schema):
    replica: int
    moved: int
    recomputed: int
    queued: int
    kept: int
    moved_tokens: int
    moved_bytes: int
    longest_pause_s: float
    seconds: float
    reasons: dict[str, int]


class ReceiptList(Schema):
    receipts: list[str]


class Life(Schema):
    id: str
    replica: int
    number: int
    state: str
    finish: str | None
    arrived_s: float
    ended_s: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_tokens: int
    miss: str | None
    events: list[dict[str, Any]]


class LifeList(Schema):
    requests: list[Life]


class CacheNode(Schema):
    node: int
    parent: int | None
    blocks: int
    tokens: int
    text: str
    hits: int
    requests: list[int]


class CacheTree(Schema):
    replica: int
    block_size: int
    num_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    prompt_tokens: int
    cached_tokens: int
    evicted_blocks: int
    tenants: list[dict[str, Any]]
    nodes: list[CacheNode]
    num_hidden: int


class ServedEngine(Schema):
    model: str
    summary: str
    max_len: int
    max_requests: int
    batching: str
    order: str
    sampling: dict[str, float]
    has_exit: bool
    no_profile: str | None


class StepError(Schema):
    median: float
    p95: float
    served_steps: int
    served_median: float | None


class BatchingFigures(Schema):
    requests: list[list[float]]
    end_s: float
    output_tokens_per_s: float
    ttft_mean_s: float
    e2e_mean_s: float
    e2e_p95_s: float
    mean_rows: float
    num_steps: int


class BatchingComparison(Schema):
    requests: list[list[float]]
    policies: dict[str, BatchingFigures]
    step_error: StepError
    machine: str
    seconds: float


class PredictedStep(Schema):
    tokens: int
    seconds: float
    low_s: float
    high_s: float
    fixed_s: float
    tokens_s: float
    cache_s: float


class StepPredictions(Schema):
    machine: str
    model: str
    step_error: StepError
    context_tokens: int
    max_len: int
    max_requests: int
    max_tokens_per_step: int
    fitting_requests: int
    decode: list[PredictedStep]
    prompt: list[PredictedStep]


class ServerInfo(Schema):
    server: str
    version: str
    model: str
    api: str


class ModelCard(Schema):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Schema):
    object: Literal["list"]
    data: list[ModelCard]


class Usage(Schema):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(Schema):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: int | str | None


class Completion(Schema):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class FunctionCall(Schema):
    name: str
    arguments: str


class ToolCall(Schema):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(Schema):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Schema):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class ChatCompletion(Schema):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ResponseDocument(Schema):
    id: str
    object: Literal["response"]
    created_at: int
    status: str
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None


class DeletedResponse(Schema):
    id: str
    object: Literal["response"]
    deleted: bool


class ItemList(Schema):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


class AnthropicMessage(Schema):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, Any]


class TokenCount(Schema):
    input_tokens: int


class Tokens(Schema):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class TokenSpan(Schema):
    id: int
    text: str
    start: int
    stop: int


class TemplatedTokens(Schema):
    tokenize_response: list[TokenSpan]
    templated_text: str


class PromptText(Schema):
    prompt: str


class GeneratedText(Schema):
    generated_text: str


class TGIInfo(Schema):
    model_id: str
    model_device_type: str
    max_concurrent_requests: int
    max_best_of: int
    max_input_tokens: int
    max_total_tokens: int
    version: str


def response_schemas(document: Any, *, error: type[Schema] = ErrorBody, stream: bool = False) -> Responses:
    """The responses of a route: a document, or events if the request asks for a stream; and its errors."""
    success: dict[str, Any] = {"model": document, "description": "The answer."}
    if stream:
        success["description"] = "The answer, or its events if `stream` is true."
        success["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    refused = {"model": error, "description": "The request is wrong, or refused for now."}
    return {200: success, "4XX": refused, "5XX": {"model": error, "description": "The server failed."}}


def text_schema(media_type: str, *, error: type[Schema] = ErrorBody) -> Responses:
    """The responses of a route whose document is plain text."""
    success = {"description": "The answer.", "content": {media_type: {"schema": {"type": "string"}}}}
    return {**response_schemas(error, error=error), 200: success}
