"""Request bodies of /v1/responses, and items: the input and output of responses, as documents and as chat messages.

A field that is not declared here is refused by name. Every short form of the input is read into items of three types.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictInt

from quire.core.params import SamplingParams
from quire.errors import InvalidParams, show
from quire.server.openai.protocol import MAX_LOGPROBS, Effort, NoEffectFields, Number
from quire.server.request_model import ArrayOf, RequestModel

Document = dict[str, Any]

LOGPROBS = "message.output_text.logprobs"

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(RequestModel):
    type: Literal["input_text"]
    text: str


class OutputText(RequestModel):
    """Text of an earlier response, with its annotations and log probabilities."""

    type: Literal["output_text"]
    text: str
    annotations: ArrayOf[Any] | None = None
    logprobs: ArrayOf[Any] | None = None


TextPart = Annotated[InputText | OutputText, Field(discriminator="type")]


def as_parts(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


Parts = Annotated[ArrayOf[TextPart], BeforeValidator(as_parts, json_schema_input_type=str | ArrayOf[TextPart])]


class MessageItem(RequestModel):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    id: str | None = None
    status: Status | None = None
    phase: str | None = None


class CallItem(RequestModel):
    """A tool call of an earlier response."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None


class CallOutputItem(RequestModel):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Parts
    id: str | None = None
    status: Status | None = None


class ReasoningText(RequestModel):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(RequestModel):
    """Reasoning of an earlier response."""

    type: Literal["reasoning"]
    content: ArrayOf[ReasoningText]
    summary: ArrayOf[Any] | None = None
    encrypted_content: None = None
    id: str | None = None
    status: Status | None = None


class ReasoningOptions(RequestModel):
    effort: Effort | None = None
    summary: None = None


InputItem = Annotated[MessageItem | CallItem | CallOutputItem | ReasoningItem, Field(discriminator="type")]


def as_items(value: Any) -> Any:
    """The input as a list of items with types. Values of another shape are left for pydantic to refuse."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    return [{"type": "message", **item} if isinstance(item, dict) else item for item in value]


class TextFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: StrictBool | None = None

    def structured(self) -> dict[str, Any] | None:
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"json_object": True}
        if self.schema_ is None or self.name is None:
            raise InvalidParams("text.format needs a name and a schema when its type is json_schema.", "text.format")
        return {"json": self.schema_}

    def document(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True, exclude_none=True)


class TextOptions(RequestModel):
    format: TextFormat | None = None
    verbosity: None = None


class ResponseStreamOptions(RequestModel):
    include_obfuscation: StrictBool | None = None  # as in StreamOptions


class ResponsesRequest(NoEffectFields):
    """POST /v1/responses. OpenAI's fields come first, then those that quire adds on other routes too."""

    input: Annotated[ArrayOf[InputItem], BeforeValidator(as_items, json_schema_input_type=str | ArrayOf[InputItem])]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: StrictInt | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    text: TextOptions | None = None
    tools: ArrayOf[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    top_logprobs: StrictInt | None = None
    include: ArrayOf[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    stream: StrictBool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: StrictBool | None = None  # has an effect here: the response can be fetched later
    metadata: dict[str, str] | None = None  # returned with the response
    background: StrictBool | None = None
    truncation: Literal["disabled"] | None = None
    reasoning: ReasoningOptions | None = None
    prompt: None = None
    conversation: None = None
    max_tool_calls: None = None

    seed: StrictInt | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    stop: str | ArrayOf[str] | None = None
    min_tokens: StrictInt | None = None
    ignore_eos: StrictBool | None = None
    early_exit: Number | None = None
    priority: StrictInt | None = None

    @property
    def stored(self) -> bool:
        return self.store is not False

    @property
    def effort(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def with_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def text_format(self) -> TextFormat:
        return (self.text and self.text.format) or TextFormat.model_validate({"type": "text"})

    def check(self) -> None:
        """Refuse fields that exclude each other."""
        if self.background and not self.stored:
            raise InvalidParams(
                "background needs store: a response that is not stored could never be fetched.", "background"
            )
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise InvalidParams(
                f"top_logprobs is {self.top_logprobs}; give a whole number from 0 to {MAX_LOGPROBS}.", "top_logprobs"
            )
        if self.top_logprobs and not self.with_logprobs:
            raise InvalidParams(f"top_logprobs needs include to hold {show(LOGPROBS)}.", "top_logprobs")

    def sampling_params(self, defaults: Mapping[str, Any], **overrides: Any) -> SamplingParams:
        """The model's `defaults`, then the fields of the request, then `overrides` of tools and structured outputs."""
        given: dict[str, Any] = {
            name: value
            for name in (
                "temperature", "top_p", "seed", "top_k", "min_p", "presence_penalty", "frequency_penalty",
                "repetition_penalty", "stop", "min_tokens", "ignore_eos", "early_exit",
            )
            if (value := getattr(self, name)) is not None
        }  # fmt: skip
        if given.get("top_k") == -1:
            given["top_k"] = 0  # vLLM's value for: keep all
        if self.with_logprobs:
            given["logprobs"] = self.top_logprobs or 0
        return SamplingParams.of({**defaults, **given, "max_tokens": self.max_output_tokens, **overrides})


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def as_document(item: InputItem) -> Document:
    """The stored form of an input item: with an id, and content in parts."""
    match item:
        case MessageItem():
            own: Document = {"role": item.role, "content": [as_part(part, item.role) for part in item.content]}
            return {"id": item.id or new_id("msg"), "type": "message", "status": item.status or "completed", **own}
        case CallItem():
            own = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
            return {"id": item.id or new_id("fc"), "type": "function_call", "status": item.status or "completed", **own}
        case CallOutputItem():
            output = "\n".join(part.text for part in item.output)
            own = {"call_id": item.call_id, "output": output, "status": item.status or "completed"}
            return {"id": item.id or new_id("fco"), "type": "function_call_output", **own}
        case ReasoningItem():
            own = {"summary": [], "content": [{"type": "reasoning_text", "text": part.text} for part in item.content]}
            return {"id": item.id or new_id("rs"), "type": "reasoning", **own, "status": item.status or "completed"}


def as_part(part: TextPart, role: str) -> Document:
    return output_part(part.text) if role == "assistant" else {"type": "input_text", "text": part.text}


def output_part(text: str) -> Document:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def as_messages(items: Sequence[Document], instructions: str | None) -> list[Document]:
    """Items as chat messages. An answer's reasoning, text and tool calls become one message of the assistant."""
    messages: list[Document] = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        match item["type"]:
            case "reasoning":
                text = "".join(part["text"] for part in item["content"])
                messages.append({"role": "assistant", "content": "", "reasoning_content": text})
            case "message" if item["role"] == "assistant" and is_reasoning(messages):
                messages[-1]["content"] = as_content(item["content"])
            case "message":
                messages.append({"role": item["role"], "content": as_content(item["content"])})
            case "function_call":
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                messages[-1].setdefault("tool_calls", []).append(as_call(item))
            case "function_call_output":
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
    return messages


def is_reasoning(messages: Sequence[Document]) -> bool:
    """Whether the last message has only reasoning so far."""
    last = messages[-1] if messages else {}
    return "reasoning_content" in last and not last["content"] and "tool_calls" not in last


def as_content(parts: Sequence[Document]) -> str | list[Document]:
    if len(parts) == 1:
        return str(parts[0]["text"])
    return [{"type": "text", "text": part["text"]} for part in parts]


def as_call(item: Document) -> Document:
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}
