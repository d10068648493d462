"""What a request to /v1/responses may say. A field that is not here is refused by name.

Input is read into items of three kinds, whatever short form they came in; `responses_items.py` goes on from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictInt

from quire.core.params import SamplingParams
from quire.errors import InvalidParams, show
from quire.server.fields import ArrayOf, Fields
from quire.server.openai.fields import NoEffectFields, Number

MAX_LOGPROBS = 20
LOGPROBS = "message.output_text.logprobs"

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Fields):
    type: Literal["input_text"]
    text: str


class OutputText(Fields):
    """What an earlier response said, with what stood beside it."""

    type: Literal["output_text"]
    text: str
    annotations: ArrayOf[Any] | None = None
    logprobs: ArrayOf[Any] | None = None


TextPart = Annotated[InputText | OutputText, Field(discriminator="type")]


def as_parts(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


Parts = Annotated[ArrayOf[TextPart], BeforeValidator(as_parts, json_schema_input_type=str | ArrayOf[TextPart])]


class MessageItem(Fields):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    id: str | None = None
    status: Status | None = None
    phase: str | None = None


class CallItem(Fields):
    """A call that the model made earlier."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None


class CallOutputItem(Fields):
    """What a call came to."""

    type: Literal["function_call_output"]
    call_id: str
    output: Parts
    id: str | None = None
    status: Status | None = None


InputItem = Annotated[MessageItem | CallItem | CallOutputItem, Field(discriminator="type")]


def as_items(value: Any) -> Any:
    """Input as a list of items that all name their type; what is not of that shape is left for pydantic to refuse."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    return [{"type": "message", **item} if isinstance(item, dict) else item for item in value]


class TextFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: StrictBool | None = None

    def structure(self) -> dict[str, Any] | None:
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"json_object": True}
        if self.schema_ is None or self.name is None:
            raise InvalidParams("text.format needs a name and a schema when its type is json_schema.", "text.format")
        return {"json": self.schema_}

    def document(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True, exclude_none=True)


class TextOptions(Fields):
    format: TextFormat | None = None
    verbosity: None = None


class ResponseStreamOptions(Fields):
    include_obfuscation: StrictBool | None = None  # as in StreamOptions


class ResponsesRequest(NoEffectFields):
    """POST /v1/responses. After OpenAI's fields come those that other routes take too."""

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
    metadata: dict[str, str] | None = None  # comes back with the response
    background: StrictBool | None = None
    truncation: Literal["disabled"] | None = None
    reasoning: None = None
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
    priority: StrictInt | None = None

    @property
    def stored(self) -> bool:
        return self.store is not False

    @property
    def with_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def text_format(self) -> TextFormat:
        return (self.text and self.text.format) or TextFormat.model_validate({"type": "text"})

    def check(self) -> None:
        """Fields that do not go together."""
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

    def sampling(self, defaults: Mapping[str, Any], **more: Any) -> SamplingParams:
        """The parameters as the engine knows them: the model's `defaults`, what the request says, and `more`, which
        tools and formats ask for."""
        given: dict[str, Any] = {
            name: value
            for name in (
                "temperature", "top_p", "seed", "top_k", "min_p", "presence_penalty", "frequency_penalty",
                "repetition_penalty", "stop", "min_tokens", "ignore_eos",
            )
            if (value := getattr(self, name)) is not None
        }  # fmt: skip
        if self.with_logprobs:
            given["logprobs"] = self.top_logprobs or 0
        return SamplingParams.of({**defaults, **given, "max_tokens": self.max_output_tokens, **more})
