"""Dialect: how one model speaks about tools, found out by asking its chat template to write a call.

Sniffing a template's source for markers tells what it mentions, not what it writes. So it renders a small conversation
with a tool, a call and a result, and the format whose parser reads the call back is the model's. A template that shows
no tools, or writes calls in a way that no format reads, is given the Hermes format in words (`tool_messages.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import TemplateError
from quire.text.templates.chat_template import ChatTemplate
from quire.text.tools.definitions import Tool, ToolChoice
from quire.text.tools.events import collect
from quire.text.tools.formats import FORMATS, HERMES, ToolFormat
from quire.text.tools.parser import ToolParser

_QUESTION, _WORDS, _RULE, _RESULT = "quire-question", "quire-words", "quire-rule", "quire-result"
_TOOL = Tool(
    name="quire_probe",
    description="quire-description",
    parameters={"type": "object", "properties": {"city": {"type": "string"}}},
    strict=False,
)
_ARGUMENTS = {"city": "Paris"}
_USER = {"role": "user", "content": _QUESTION}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """
    format            how calls look in an answer
    is_native         the template itself shows the tools, and earlier calls and their results
    takes_system      the template has a place for a system message
    text_arguments    the template wants the arguments of earlier calls as JSON text, not as objects
    one_call          the template takes one call a message
    """

    format: ToolFormat
    is_native: bool = False
    takes_system: bool = True
    text_arguments: bool = False
    one_call: bool = False


def choose_dialect(template: ChatTemplate | None) -> Dialect:
    """What this template speaks. It takes a few renderings: ask once for a template."""
    if template is None:
        return Dialect(format=HERMES)
    takes_system = _RULE in _render(template, [{"role": "system", "content": _RULE}, _USER])
    for text_arguments in (False, True):
        written = _write_answer(template, 1, text_arguments)
        format = next((format for format in FORMATS if _can_read(format, written, 1)), None)
        if format is not None:
            one_call = not _can_read(format, _write_answer(template, 2, text_arguments), 2)
            return Dialect(
                format=format,
                is_native=True,
                takes_system=takes_system,
                text_arguments=text_arguments,
                one_call=one_call,
            )
    return Dialect(format=HERMES, takes_system=takes_system)


def _write_answer(template: ChatTemplate, num_calls: int, text_arguments: bool) -> str:
    """An answer with calls as the template writes it, and what follows; empty if it loses the tool or the results."""
    arguments = json.dumps(_ARGUMENTS) if text_arguments else _ARGUMENTS
    function = {"name": _TOOL.name, "arguments": arguments}
    calls = [{"id": f"quirecal{index}", "type": "function", "function": function} for index in range(num_calls)]
    words = [f"{_RESULT}{index}" for index in range(num_calls)]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": _TOOL.name, "content": content}
        for call, content in zip(calls, words, strict=True)
    ]
    text = _render(template, [_USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results])
    if not all(shown in text for shown in (_TOOL.description, _QUESTION, *words)):
        return ""
    _, _, answer = text.partition(_QUESTION)
    return answer.removeprefix(_write_header(template))


def _write_header(template: ChatTemplate) -> str:
    """What stands between a question and its answer."""
    text = _render(template, [_USER, {"role": "assistant", "content": _WORDS}])
    return text.partition(_QUESTION)[2].partition(_WORDS)[0]


def _render(template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> str:
    """Empty if the template will not have it."""
    try:
        return template.render(messages, tools=[_TOOL.document()], add_generation_prompt=False)
    except TemplateError:
        return ""


def _can_read(format: ToolFormat, answer: str, num_calls: int) -> bool:
    parser = ToolParser(format, ToolChoice(mode="auto", tools=(_TOOL,)), id_source="")
    calls = collect([*parser.push(answer), *parser.finish()]).calls
    return len(calls) == num_calls and all(call.complete and json.loads(call.arguments) == _ARGUMENTS for call in calls)
