"""Request bodies of Anthropic's Messages API, and their conversion to a `ChatInput`.

A field or a type of block that is not declared here is refused by name. `cache_control`, `metadata` and `service_tier`
do not change the answer: they are accepted and have no effect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictInt

from quire.core.params import SamplingParams
from quire.errors import InvalidParams
from quire.server.chat import ChatInput
from quire.server.openai.protocol import Number
from quire.server.request_model import ArrayOf, RequestModel
from quire.text.tools.definitions import Tool, ToolChoice, check_tools, force_tool, make_tool, parse_tool_choice

Document = dict[str, Any]
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class TextBlock(RequestModel):
    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None
    citations: ArrayOf[Any] | None = None


def as_blocks(value: Any) -> Any:
    """A string is short for one block of text."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Texts = Annotated[ArrayOf[TextBlock], BeforeValidator(as_blocks, json_schema_input_type=str | ArrayOf[TextBlock])]


class ToolUseBlock(RequestModel):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: dict[str, Any] | None = None


class ToolResultBlock(RequestModel):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = Field(default_factory=list)
    is_error: StrictBool | None = None
    cache_control: dict[str, Any] | None = None


class ThinkingBlock(RequestModel):
    """The reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class Message(RequestModel):
    role: Literal["user", "assistant", "system"]
    content: Annotated[ArrayOf[Block], BeforeValidator(as_blocks, json_schema_input_type=str | ArrayOf[Block])]


class ToolFields(RequestModel):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: StrictBool | None = None
    cache_control: dict[str, Any] | None = None


class ToolChoiceFields(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: StrictBool | None = None


class Disabled(RequestModel):
    type: Literal["disabled"]


class OutputFormat(RequestModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    format: OutputFormat | None = None
    effort: None = None


class Metadata(RequestModel):
    user_id: str | None = None


class PromptFields(RequestModel):
    """The fields of a prompt, for messages and for counting tokens."""

    model: str | None = None
    messages: ArrayOf[Message]
    system: Texts | None = None
    tools: ArrayOf[ToolFields] | None = None
    tool_choice: ToolChoiceFields | None = None
    thinking: Disabled | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None

    def structured(self) -> dict[str, Any] | None:
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

    def sampling_params(self, defaults: Mapping[str, Any], **overrides: Any) -> SamplingParams:
        """The model's `defaults`, then the fields of the request, then `overrides` of tools and structured outputs."""
        given = {
            name: value
            for name in ("max_tokens", "temperature", "top_k", "top_p", "seed")
            if (value := getattr(self, name)) is not None
        }
        return SamplingParams.of({**defaults, **given, "stop": self.stop_sequences or (), **overrides})


def chat_input(body: PromptFields) -> ChatInput:
    tools = parse_tools(body)
    messages, prefill = split_prefill(body.messages)
    system = [{"role": "system", "content": text_of(body.system)}] if body.system else []
    return ChatInput(
        messages=[*system, *as_messages(messages)],
        tools=tools,
        tool_choice=read_tool_choice(body.tool_choice, tools),
        structured_outputs=body.structured(),
        prefill=prefill,
        is_thinking_disabled=body.thinking is not None,
    )


def split_prefill(messages: Sequence[Message]) -> tuple[Sequence[Message], str]:
    """A last message of the assistant is the beginning of the answer (prefill)."""
    if not messages or messages[-1].role != "assistant":
        return messages, ""
    last = messages[-1]
    texts = [block for block in last.content if isinstance(block, TextBlock)]
    if len(texts) < len(last.content):
        raise InvalidParams(
            "The last message calls tools or has thinking; give a message of the user's after it, or text alone."
        )
    return messages[:-1], "".join(block.text for block in texts)


def as_messages(messages: Sequence[Message]) -> list[Document]:
    """Messages of the same role in a row become one message. Tool results become messages of their own before it."""
    written: list[Document] = []
    for index, message in enumerate(messages):
        results = [block for block in message.content if isinstance(block, ToolResultBlock)]
        calls = [block for block in message.content if isinstance(block, ToolUseBlock)]
        texts = [block for block in message.content if isinstance(block, TextBlock)]
        thoughts = [block for block in message.content if isinstance(block, ThinkingBlock)]
        check_role(message, thoughts, "thinking", "assistant", index)
        check_role(message, results, "tool_result", "user", index)
        check_role(message, calls, "tool_use", "assistant", index)
        written += [as_result(block) for block in results]
        if not texts and not calls and not thoughts:
            continue
        if not written or written[-1]["role"] != message.role:
            written.append({"role": message.role, "content": None})
        extend_message(written[-1], texts, calls, thoughts)
    return written


def check_role(message: Message, blocks: Sequence[object], kind: str, role: str, index: int) -> None:
    if blocks and message.role != role:
        raise InvalidParams(f"messages.{index} holds a {kind} block, which only a message with the role {role!r} can.")


def extend_message(
    written: Document, texts: Sequence[TextBlock], calls: Sequence[ToolUseBlock], thoughts: Sequence[ThinkingBlock]
) -> None:
    if thoughts:
        earlier = [written["reasoning_content"]] if written.get("reasoning_content") else []
        written["reasoning_content"] = "\n".join([*earlier, *(block.thinking for block in thoughts)])
        written["content"] = written["content"] or ""
    if texts:
        written["content"] = "\n".join([*([written["content"]] if written["content"] else []), text_of(texts)])
    if calls:
        written.setdefault("tool_calls", []).extend(as_call(block) for block in calls)


def as_call(block: ToolUseBlock) -> Document:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def as_result(block: ToolResultBlock) -> Document:
    """Chat templates have no field for a failed call, so its text begins with `Error:`."""
    text = text_of(block.content)
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": f"Error: {text}" if block.is_error else text}


def text_of(blocks: Sequence[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)


def parse_tools(body: PromptFields) -> tuple[Tool, ...]:
    return check_tools(
        [
            make_tool(
                f"tools[{index}]",
                name=tool.name,
                description=tool.description,
                parameters=tool.input_schema,
                strict=tool.strict,
                schema_field="input_schema",
            )
            for index, tool in enumerate(body.tools or ())
        ]
    )


def read_tool_choice(given: ToolChoiceFields | None, tools: Sequence[Tool]) -> ToolChoice:
    if given is None:
        return parse_tool_choice(None, tools)
    if given.type == "tool":
        return force_tool(given.name, "tool_choice.name", tools)
    if given.name is not None:
        raise InvalidParams(f"tool_choice.name goes with the type 'tool'; the type is {given.type!r}.")
    return parse_tool_choice(TOOL_CHOICES[given.type], tools, not given.disable_parallel_tool_use, "tool_choice.type")
