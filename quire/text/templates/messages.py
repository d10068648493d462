"""Messages with tools, prepared for a chat template.

`prepare_messages` takes OpenAI's messages. A template that supports tools gets them in the form that it requires. For
any other template, tools, earlier calls and their results become text. The server calls it before
`ChatTemplate.render`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidParams, kind, show
from quire.text.templates.capabilities import TemplateCapabilities
from quire.text.templates.chat_template import check_messages
from quire.text.tools.definitions import Tool
from quire.text.tools.events import ToolCall
from quire.text.tools.formats import HARMONY, ToolFormat, write_calls

Message = dict[str, Any]

SHORT_ID_LENGTH = 9


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """Arguments of `ChatTemplate.render`."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None


def prepare_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], capabilities: TemplateCapabilities
) -> TemplateInput:
    """The messages for a template with these capabilities. `tools` are those that the prompt shows."""
    check_messages(messages)
    messages = [_name_reasoning(message, f"messages[{index}]") for index, message in enumerate(messages)]
    calls = [_parse_calls(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if not capabilities.supports_tools:
        plain = _calls_as_text(messages, calls, capabilities.format)
        return TemplateInput(_add_description(plain, tools, capabilities) if tools else plain, None)
    native = _add_tool_names(
        [
            _native_message(message, calls_made, capabilities)
            for message, calls_made in zip(messages, calls, strict=True)
        ]
    )
    documents = [tool.to_openai() for tool in tools]
    return TemplateInput(_split_calls(native) if capabilities.single_tool_call else native, documents or None)


def _name_reasoning(message: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The reasoning of an earlier answer under one name: clients say `reasoning` or `reasoning_content`."""
    given = [name for name in ("reasoning", "reasoning_content") if message.get(name) is not None]
    for name in given:
        if not isinstance(message[name], str):
            raise InvalidParams(f"{where}.{name} is {kind(message[name])}; give text.", f"{where}.{name}")
    if not given:
        return message
    rest = {key: value for key, value in message.items() if key != "reasoning"}
    return {**rest, "reasoning_content": message[given[-1]]}


def describe_tools(tools: Sequence[Tool], format: ToolFormat) -> str:
    """A description of the tools and of the format of a call, for a model whose template supports no tools."""
    listing = "\n".join(json.dumps(tool.to_openai()["function"], ensure_ascii=False) for tool in tools)
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


def _parse_calls(message: Mapping[str, Any], where: str) -> list[ToolCall]:
    """The calls of an earlier answer. Their arguments must be JSON objects."""
    calls = message.get("tool_calls")
    if not calls:
        return []
    if message["role"] != "assistant" or not isinstance(calls, Sequence) or isinstance(calls, str):
        raise InvalidParams(
            f"{where}.tool_calls must be a list, in a message of the assistant's.", f"{where}.tool_calls"
        )
    return [_parse_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]


def _parse_call(call: object, where: str) -> ToolCall:
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
    raise InvalidParams(f"{where} is not the JSON text of an object; send it unchanged, or leave the call out.", where)


def _calls_as_text(
    messages: Sequence[Mapping[str, Any]], calls: Sequence[Sequence[ToolCall]], format: ToolFormat
) -> list[Message]:
    """Calls become text of the assistant. Successive results become one message of the user."""
    plain: list[Message] = []
    previous = None
    for message, calls_made in zip(messages, calls, strict=True):
        if message["role"] == "tool":
            result = write_result(_text_of(message))
            if previous == "tool":
                plain[-1]["content"] += "\n" + result
            else:
                plain.append({"role": "user", "content": result})
        elif calls_made:
            said = [text for text in (_text_of(message), write_calls(format, calls_made)) if text]
            plain.append({"role": "assistant", "content": "\n".join(said)})
        elif message["role"] == "user" and previous == "tool":  # many templates require that the roles alternate
            plain[-1]["content"] += "\n" + _text_of(message)
        else:
            plain.append(_without_calls(message))
        previous = message["role"]
    return plain


def _add_description(
    messages: list[Message], tools: Sequence[Tool], capabilities: TemplateCapabilities
) -> list[Message]:
    description = describe_tools(tools, capabilities.format)
    first = messages[0]
    if first["role"] == "system":
        return [{**first, "content": f"{_text_of(first)}\n\n{description}"}, *messages[1:]]
    if capabilities.supports_system_role:
        return [{"role": "system", "content": description}, *messages]
    return [{**first, "content": f"{description}\n\n{_text_of(first)}"}, *messages[1:]]


def _native_message(
    message: Mapping[str, Any], calls: Sequence[ToolCall], capabilities: TemplateCapabilities
) -> Message:
    """A message for a template that supports tools."""
    native = _without_calls(message)
    if capabilities.format is HARMONY and "reasoning_content" in native:
        native["thinking"] = native.pop("reasoning_content")
    shorten = _short_id if capabilities.format.short_ids else str
    if calls:
        native["content"] = message.get("content") or ""  # some templates read its length without a check for none
        native["tool_calls"] = [
            {
                "id": shorten(call.id),
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call.arguments if capabilities.requires_text_arguments else json.loads(call.arguments),
                },
            }
            for call in calls
        ]
        if native.get("thinking") and native["content"]:  # Harmony's template takes one of them beside a call
            native["thinking"] = "\n\n".join((native["thinking"], _text_of(native)))
            native["content"] = ""
    if isinstance(message.get("tool_call_id"), str):
        native["tool_call_id"] = shorten(message["tool_call_id"])
    return native


def _without_calls(message: Mapping[str, Any]) -> Message:
    """The message without tool_calls. Some templates test only whether the field exists."""
    return {key: value for key, value in message.items() if key != "tool_calls"}


def _add_tool_names(messages: list[Message]) -> list[Message]:
    """Add the function's name to each result, because some templates render it."""
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    for message in messages:
        if message["role"] == "tool" and not message.get("name") and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]
    return messages


def _split_calls(messages: list[Message]) -> list[Message]:
    """Split a message with several calls into one message for each call, followed by its result. The first one has the
    text and the reasoning."""
    split: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls", ())
        if len(calls) > 1:
            split.append({**message, "tool_calls": [calls[0]]})
            rest = {key: value for key, value in message.items() if key not in ("thinking", "reasoning_content")}
            split += [{**rest, "content": "", "tool_calls": [call]} for call in calls[1:]]
        elif message["role"] == "tool":
            split.insert(_index_after_call(message, split), message)
        else:
            split.append(message)
    return split


def _index_after_call(result: Message, messages: Sequence[Message]) -> int:
    for index in range(len(messages) - 1, -1, -1):
        calls = messages[index].get("tool_calls")
        if calls and calls[0]["id"] == result.get("tool_call_id"):
            return index + 1
    return len(messages)


def _short_id(call_id: str) -> str:
    """The id itself if it has the required length, or else a digest of it."""
    if len(call_id) == SHORT_ID_LENGTH and call_id.isalnum() and call_id.isascii():
        return call_id
    return hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:SHORT_ID_LENGTH]


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] for part in content)
