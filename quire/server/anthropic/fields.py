"""What requests of Anthropic's Messages API may say. A field or a kind of block that is not here is refused by name.

`cache_control` and what else says something about the request but does not change the answer is taken and left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictInt

from quire.core.params import SamplingParams
from quire.server.fields import ArrayOf, Fields
from quire.server.openai.fields import Number


class TextBlock(Fields):
    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None
    citations: ArrayOf[Any] | None = None


def as_blocks(value: Any) -> Any:
    """Text is short for one block of text."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Texts = Annotated[ArrayOf[TextBlock], BeforeValidator(as_blocks, json_schema_input_type=str | ArrayOf[TextBlock])]


class ToolUseBlock(Fields):
    """A call that the model made earlier."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: dict[str, Any] | None = None


class ToolResultBlock(Fields):
    """What a call came to."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = Field(default_factory=list)
    is_error: StrictBool | None = None
    cache_control: dict[str, Any] | None = None


Block = Annotated[TextBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class Message(Fields):
    role: Literal["user", "assistant", "system"]
    content: Annotated[ArrayOf[Block], BeforeValidator(as_blocks, json_schema_input_type=str | ArrayOf[Block])]


class ToolFields(Fields):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: StrictBool | None = None
    cache_control: dict[str, Any] | None = None


class ToolChoiceFields(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: StrictBool | None = None


class Disabled(Fields):
    type: Literal["disabled"]


class OutputFormat(Fields):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    format: OutputFormat | None = None
    effort: None = None


class Metadata(Fields):
    user_id: str | None = None


class PromptFields(Fields):
    """What makes a prompt: of a message, and to count its tokens."""

    model: str | None = None
    messages: ArrayOf[Message]
    system: Texts | None = None
    tools: ArrayOf[ToolFields] | None = None
    tool_choice: ToolChoiceFields | None = None
    thinking: Disabled | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None

    def structure(self) -> dict[str, Any] | None:
        format = self.output_config.format if self.output_config else None
        return {"json": format.schema_} if format else None


class CountRequest(PromptFields):
    """POST /v1/messages/count_tokens"""


class MessagesRequest(PromptFields):
    """POST /v1/messages, with a seed and a priority beside Anthropic's fields."""

    max_tokens: StrictInt
    stop_sequences: ArrayOf[str] | None = None
    stream: StrictBool | None = None
    temperature: Number | None = None
    top_k: StrictInt | None = None
    top_p: Number | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    seed: StrictInt | None = None
    priority: StrictInt | None = None

    def sampling(self, defaults: Mapping[str, Any], **more: Any) -> SamplingParams:
        """The parameters as the engine knows them: the model's `defaults`, what the request says, and `more`, which
        tools and formats ask for."""
        given = {
            name: value
            for name in ("max_tokens", "temperature", "top_k", "top_p", "seed")
            if (value := getattr(self, name)) is not None
        }
        return SamplingParams.of({**defaults, **given, "stop": self.stop_sequences or (), **more})
