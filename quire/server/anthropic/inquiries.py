"""Anthropic's blocks, tools and choices as the rest of the server knows them: the way in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from quire.errors import InvalidParams
from quire.server.anthropic.fields import (
    Message,
    PromptFields,
    TextBlock,
    ToolChoiceFields,
    ToolResultBlock,
    ToolUseBlock,
)
from quire.server.conversation import Inquiry
from quire.text.tools.definitions import Tool, ToolChoice, check_tools, force_tool, make_tool, parse_tool_choice

Document = dict[str, Any]

CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def make_inquiry(body: PromptFields) -> Inquiry:
    tools = parse_tools(body)
    messages, prefill = split_prefill(body.messages)
    system = [{"role": "system", "content": text_of(body.system)}] if body.system else []
    return Inquiry(
        messages=[*system, *as_messages(messages)],
        tools=tools,
        choice=read_tool_choice(body.tool_choice, tools),
        structure=body.structure(),
        prefill=prefill,
    )


def split_prefill(messages: Sequence[Message]) -> tuple[Sequence[Message], str]:
    """A last message of the assistant's is the beginning of the answer, not a turn of its own."""
    if not messages or messages[-1].role != "assistant":
        return messages, ""
    last = messages[-1]
    texts = [block for block in last.content if isinstance(block, TextBlock)]
    if len(texts) < len(last.content):
        raise InvalidParams("The last message calls tools; give their results after it, in a message of the user's.")
    return messages[:-1], "".join(block.text for block in texts)


def as_messages(messages: Sequence[Message]) -> list[Document]:
    """Turns in a row of the same side are one turn. Results of calls are messages of their own, ahead of the text."""
    written: list[Document] = []
    for index, message in enumerate(messages):
        results = [block for block in message.content if isinstance(block, ToolResultBlock)]
        calls = [block for block in message.content if isinstance(block, ToolUseBlock)]
        texts = [block for block in message.content if isinstance(block, TextBlock)]
        check_side(message, results, "tool_result", "user", index)
        check_side(message, calls, "tool_use", "assistant", index)
        written += [as_result(block) for block in results]
        if not texts and not calls:
            continue
        if not written or written[-1]["role"] != message.role:
            written.append({"role": message.role, "content": None})
        add_to_turn(written[-1], texts, calls)
    return written


def check_side(message: Message, blocks: Sequence[object], kind: str, side: str, index: int) -> None:
    if blocks and message.role != side:
        raise InvalidParams(f"messages.{index} holds a {kind} block, which only a message with the role {side!r} can.")


def add_to_turn(turn: Document, texts: Sequence[TextBlock], calls: Sequence[ToolUseBlock]) -> None:
    if texts:
        turn["content"] = "\n".join([*([turn["content"]] if turn["content"] else []), text_of(texts)])
    if calls:
        turn.setdefault("tool_calls", []).extend(as_call(block) for block in calls)


def as_call(block: ToolUseBlock) -> Document:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def as_result(block: ToolResultBlock) -> Document:
    """Templates know no failed calls, so the text says it."""
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
    return parse_tool_choice(CHOICES[given.type], tools, not given.disable_parallel_tool_use, "tool_choice.type")
