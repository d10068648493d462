"""Items of the Responses API: what came in and what was answered, as documents to be stored and listed, and as the
messages that a chat template takes.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from quire.server.openai.responses_fields import CallItem, CallOutputItem, InputItem, MessageItem, TextPart

Document = dict[str, Any]


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def as_document(item: InputItem) -> Document:
    """An item of the input as it is stored: with an id, and content in parts."""
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


def as_part(part: TextPart, role: str) -> Document:
    return output_part(part.text) if role == "assistant" else {"type": "input_text", "text": part.text}


def output_part(text: str) -> Document:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def as_messages(items: Sequence[Document], instructions: str | None) -> list[Document]:
    """The conversation that the items are. Calls belong to the assistant's turn that they stand in."""
    messages: list[Document] = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        match item["type"]:
            case "message":
                messages.append({"role": item["role"], "content": as_content(item["content"])})
            case "function_call":
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                messages[-1].setdefault("tool_calls", []).append(as_call(item))
            case "function_call_output":
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
    return messages


def as_content(parts: Sequence[Document]) -> str | list[Document]:
    if len(parts) == 1:
        return str(parts[0]["text"])
    return [{"type": "text", "text": part["text"]} for part in parts]


def as_call(item: Document) -> Document:
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}
