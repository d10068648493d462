"""A conversation about tools, as a chat template can render it.

`prepare_messages` takes messages as OpenAI writes them. A template that knows tools gets them in the shape it wants.
For any other, the tools, earlier calls and their results become plain text of messages it does know. Routes call it
before `ChatTemplate.render`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidParams, show
from quire.text.templates.capabilities import Dialect
from quire.text.templates.chat_template import check_messages
from quire.text.tools.definitions import Tool
from quire.text.tools.events import ToolCall
from quire.text.tools.formats import ToolFormat, write_calls

Message = dict[str, Any]

NUM_SHORT_ID = 9


@dataclass(frozen=True, slots=True)
class Conversation:
    """What `ChatTemplate.render` takes."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None


def prepare_messages(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], dialect: Dialect) -> Conversation:
    """The conversation for a template of this dialect. `tools` are those that the prompt is to show."""
    check_messages(messages)
    calls = [_read_calls(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if not dialect.is_native:
        spoken = _speak_of_calls(messages, calls, dialect.format)
        return Conversation(_explain(spoken, tools, dialect) if tools else spoken, None)
    shaped = _name_results([_shape(message, made, dialect) for message, made in zip(messages, calls, strict=True)])
    documents = [tool.document() for tool in tools]
    return Conversation(_one_call_each(shaped) if dialect.one_call else shaped, documents or None)


def explain_tools(tools: Sequence[Tool], format: ToolFormat) -> str:
    """For a model that was not taught this format: what there is to call, and how to write a call."""
    listing = "\n".join(json.dumps(tool.document()["function"], ensure_ascii=False) for tool in tools)
    example = write_calls(format, [ToolCall("", "the function's name", '{"argument": "value"}')])
    return (
        "You can call functions. Each of these lines describes one, with the JSON schema of its arguments:\n"
        f"<tools>\n{listing}\n</tools>\n"
        "To call a function, write its name and its arguments exactly like this:\n"
        f"{example}\n"
        "Write such a block for every call, and nothing after the last one. The results will be given to you as\n"
        f"{write_result('the result')}\n"
        "If no function is of use, answer in plain words."
    )


def write_result(text: str) -> str:
    return f"<tool_response>\n{text}\n</tool_response>"


def _read_calls(message: Mapping[str, Any], where: str) -> list[ToolCall]:
    """The calls of an earlier answer, their arguments checked to be objects."""
    calls = message.get("tool_calls")
    if not calls:
        return []
    if message["role"] != "assistant" or not isinstance(calls, Sequence) or isinstance(calls, str):
        raise InvalidParams(
            f"{where}.tool_calls must be a list, in a message of the assistant's.", f"{where}.tool_calls"
        )
    return [_read_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]


def _read_call(call: object, where: str) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise InvalidParams(f"{where} is no call; give an object with an id and a function.", where)
    name, arguments, call_id = function.get("name"), function.get("arguments"), call.get("id")
    if not isinstance(name, str) or not name:
        raise InvalidParams(
            f"{where}.function.name is {show(name)}; give the name of the function that was called.",
            f"{where}.function.name",
        )
    if not isinstance(call_id, str) or not call_id:
        raise InvalidParams(f"{where}.id is {show(call_id)}; give the id that the call came with.", f"{where}.id")
    return ToolCall(call_id, name, _arguments_text(arguments, f"{where}.function.arguments"))


def _arguments_text(arguments: object, where: str) -> str:
    try:
        value = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        if isinstance(value, Mapping):
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        pass
    raise InvalidParams(f"{where} is not the JSON text of an object; send it as it came, or leave the call out.", where)


def _speak_of_calls(
    messages: Sequence[Mapping[str, Any]], calls: Sequence[Sequence[ToolCall]], format: ToolFormat
) -> list[Message]:
    """Calls as the model writes them, and results as words of the user's, several in one message."""
    spoken: list[Message] = []
    previous = None
    for message, made in zip(messages, calls, strict=True):
        if message["role"] == "tool":
            result = write_result(_text_of(message))
            if previous == "tool":
                spoken[-1]["content"] += "\n" + result
            else:
                spoken.append({"role": "user", "content": result})
        elif made:
            said = [text for text in (_text_of(message), write_calls(format, made)) if text]
            spoken.append({"role": "assistant", "content": "\n".join(said)})
        elif message["role"] == "user" and previous == "tool":  # many templates want the roles to alternate
            spoken[-1]["content"] += "\n" + _text_of(message)
        else:
            spoken.append(_without_calls(message))
        previous = message["role"]
    return spoken


def _explain(messages: list[Message], tools: Sequence[Tool], dialect: Dialect) -> list[Message]:
    explanation = explain_tools(tools, dialect.format)
    first = messages[0]
    if first["role"] == "system":
        return [{**first, "content": f"{_text_of(first)}\n\n{explanation}"}, *messages[1:]]
    if dialect.takes_system:
        return [{"role": "system", "content": explanation}, *messages]
    return [{**first, "content": f"{explanation}\n\n{_text_of(first)}"}, *messages[1:]]


def _shape(message: Mapping[str, Any], calls: Sequence[ToolCall], dialect: Dialect) -> Message:
    """A message for a template that knows tools."""
    shaped = _without_calls(message)
    shorten = _short_id if dialect.format.short_ids else str
    if calls:
        shaped["content"] = message.get("content") or ""  # some templates measure it without asking whether it is there
        shaped["tool_calls"] = [
            {
                "id": shorten(call.id),
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call.arguments if dialect.text_arguments else json.loads(call.arguments),
                },
            }
            for call in calls
        ]
    if isinstance(message.get("tool_call_id"), str):
        shaped["tool_call_id"] = shorten(message["tool_call_id"])
    return shaped


def _without_calls(message: Mapping[str, Any]) -> Message:
    """Some templates take the mere presence of the field for calls."""
    return {key: value for key, value in message.items() if key != "tool_calls"}


def _name_results(messages: list[Message]) -> list[Message]:
    """Results with the name of the function that they come from, which some templates show."""
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    for message in messages:
        if message["role"] == "tool" and not message.get("name") and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]
    return messages


def _one_call_each(messages: list[Message]) -> list[Message]:
    """A message with several calls as several messages, each followed by its result."""
    apart: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls", ())
        if len(calls) > 1:
            apart.append({**message, "tool_calls": [calls[0]]})
            apart += [{**message, "content": "", "tool_calls": [call]} for call in calls[1:]]
        elif message["role"] == "tool":
            apart.insert(_behind_its_call(message, apart), message)
        else:
            apart.append(message)
    return apart


def _behind_its_call(result: Message, messages: Sequence[Message]) -> int:
    for place in range(len(messages) - 1, -1, -1):
        calls = messages[place].get("tool_calls")
        if calls and calls[0]["id"] == result.get("tool_call_id"):
            return place + 1
    return len(messages)


def _short_id(call_id: str) -> str:
    """An id as it is if it is short enough, or else a digest of it."""
    if len(call_id) == NUM_SHORT_ID and call_id.isalnum() and call_id.isascii():
        return call_id
    return hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:NUM_SHORT_ID]


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] for part in content)
