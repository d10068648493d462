"""TemplateCapabilities: what a chat template supports, and the format in which its model writes tool calls.

They are detected by rendering, as in llama.cpp's minja, because the source of a template shows what it mentions and not
what it writes. `detect_capabilities` renders a small conversation with a tool, a call and a result. The format whose
parser reads the call back is the model's. If the template shows no tools, or no format can parse its calls, tools are
described in the Hermes format in a message (`messages.py`). Only the format of reasoning is read from the source.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import TemplateError
from quire.text.reasoning.formats import ReasoningFormat, detect_reasoning
from quire.text.reasoning.harmony import HarmonyParser
from quire.text.templates.chat_template import ChatTemplate
from quire.text.tools.definitions import Tool, ToolChoice
from quire.text.tools.events import collect_events
from quire.text.tools.formats import FORMATS, HARMONY, HERMES, ToolFormat
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
class TemplateCapabilities:
    """
    format                    how the model writes calls
    supports_tools            the template renders tools, earlier calls and their results
    supports_system_role      the template renders a system message
    requires_text_arguments   the arguments of earlier calls must be JSON text, not objects
    single_tool_call          a message may have one call only
    reasoning                 how the model writes reasoning; None if it writes none, or in Harmony's channels
    """

    format: ToolFormat
    supports_tools: bool = False
    supports_system_role: bool = True
    requires_text_arguments: bool = False
    single_tool_call: bool = False
    reasoning: ReasoningFormat | None = None


def detect_capabilities(template: ChatTemplate | None) -> TemplateCapabilities:
    """Render test conversations. This takes several renderings, so call it once for a template."""
    if template is None:
        return TemplateCapabilities(format=HERMES)
    reasoning = detect_reasoning(template.source)
    supports_system_role = _RULE in _render(template, [{"role": "system", "content": _RULE}, _USER])
    for requires_text_arguments in (False, True):
        written = _render_answer(template, 1, requires_text_arguments)
        format = next((format for format in (HARMONY, *FORMATS) if _can_parse(format, written, 1)), None)
        if format is not None:
            single_tool_call = not _can_parse(format, _render_answer(template, 2, requires_text_arguments), 2)
            return TemplateCapabilities(
                format=format,
                supports_tools=True,
                supports_system_role=supports_system_role,
                requires_text_arguments=requires_text_arguments,
                single_tool_call=single_tool_call,
                reasoning=None if format is HARMONY else reasoning,
            )
    return TemplateCapabilities(format=HERMES, supports_system_role=supports_system_role, reasoning=reasoning)


def _render_answer(template: ChatTemplate, num_calls: int, requires_text_arguments: bool) -> str:
    """An answer with calls and the text behind it, as rendered; empty if the tool or a result is missing."""
    arguments = json.dumps(_ARGUMENTS) if requires_text_arguments else _ARGUMENTS
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
    return answer.removeprefix(_render_header(template))


def _render_header(template: ChatTemplate) -> str:
    """The text between a question and its answer."""
    text = _render(template, [_USER, {"role": "assistant", "content": _WORDS}])
    return text.partition(_QUESTION)[2].partition(_WORDS)[0]


def _render(template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> str:
    """The rendered conversation; empty if the template fails."""
    try:
        return template.render(messages, tools=[_TOOL.to_openai()], add_generation_prompt=False)
    except TemplateError:
        return ""


def _can_parse(format: ToolFormat, answer: str, num_calls: int) -> bool:
    choice = ToolChoice(mode="auto", tools=(_TOOL,))
    parser = HarmonyParser(choice, "") if format is HARMONY else ToolParser(format, choice, "")
    calls = collect_events([*parser.push(answer), *parser.finish()]).calls
    return len(calls) == num_calls and all(call.complete and json.loads(call.arguments) == _ARGUMENTS for call in calls)
