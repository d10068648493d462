"""ToolParser: what is a call, what is text, and when each is emitted."""

from __future__ import annotations

import re

import pytest

from quire.text.tools.definitions import NO_TOOLS, ToolChoice, parse_tool_choice
from quire.text.tools.events import (
    ArgumentsDelta,
    TextDelta,
    ToolCall,
    ToolCallEnd,
    ToolCallStart,
    collect_events,
    make_call_id,
)
from quire.text.tools.formats import FORMATS, HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, write_calls
from quire.text.tools.parser import ToolParser
from tests.text.tools.answers import AUTO, GET, ONE, TOOLS, brief, parse, stream

pytestmark = pytest.mark.core

PARIS = '{"city": "Paris"}'
WEATHER_CALL = ("get_weather", PARIS)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (HERMES, f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'),
        (HERMES, f'\n\n<tool_call>{{"name":"get_weather","arguments":{PARIS}}}</tool_call>\n'),
        (HERMES, f'<tool_call>\n{{"arguments": {PARIS}, "name": "get_weather"}}\n</tool_call>'),
        (HERMES, f'<tool_call>[{{"name": "get_weather", "parameters": {PARIS}}}]</tool_call>'),
        (HERMES, f'<tool_call>\n{{"id": "1", "name": "get_weather", "arguments": {PARIS}, "type": "f"}}\n</tool_call>'),
        (HERMES, f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}'),
        (HERMES, f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_'),
        (HERMES, f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}\n</tool_call>'),
        (MISTRAL, f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}]'),
        (MISTRAL, f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}, "id": "abcdefghi"}}]'),
        (MISTRAL, f'[TOOL_CALLS]{{"name": "get_weather", "arguments": {PARIS}}}'),
        (MISTRAL_NAMED, f"[TOOL_CALLS]get_weather[ARGS]{PARIS}"),
        (MISTRAL_NAMED, f"[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS] {PARIS}"),
        (LLAMA, f'{{"name": "get_weather", "parameters": {PARIS}}}'),
        (LLAMA, f'\n{{"type": "function", "name": "get_weather", "parameters": {PARIS}}}\n'),
        (LLAMA, f'<|python_tag|>{{"name": "get_weather", "parameters": {PARIS}}}'),
        (LLAMA, f'{{"name": "get_weather", "parameters": {PARIS}}};'),
    ],
)
def test_a_call(format, text):
    assert brief(parse(format, text)) == ("", [WEATHER_CALL])


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_calls_as_they_are_written(format):
    calls = [ToolCall("", "get", PARIS)] * 3
    assert brief(parse(format, write_calls(format, calls))) == ("", [("get", PARIS)] * 3)


def test_a_tool_without_parameters_needs_no_arguments():
    assert brief(parse(HERMES, '<tool_call>\n{"name": "get_time"}\n</tool_call>')) == ("", [("get_time", "{}")])
    assert brief(parse(LLAMA, '{"name": "get_time" }')) == ("", [("get_time", "{}")])


def test_words_around_calls():
    text = 'Let me look.\n\n<tool_call>{"name": "get", "arguments": {}}</tool_call>\n <tool_call>\n{"name": '
    text += f'"get_weather", "arguments": {PARIS}}}\n</tool_call>\nDone. \n'
    assert brief(parse(HERMES, text)) == ("Let me look.\nDone. \n", [("get", "{}"), WEATHER_CALL])
    assert brief(parse(MISTRAL_NAMED, "Well [TOOL_CALLS]get[ARGS]{}[TOOL_CALLS]get_time[ARGS]{}!")) == (
        "Well!",
        [("get", "{}"), ("get_time", "{}")],
    )


def test_markers_within_arguments_are_arguments():
    arguments = '{"key": "</tool_call> <tool_call>{\\"name\\": }}"}'
    text = f'<tool_call>{{"name": "get", "arguments": {arguments}}}</tool_call>'
    assert brief(parse(HERMES, text)) == ("", [("get", arguments)])


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (HERMES, ""),
        (HERMES, " \n"),
        (HERMES, "a < b <tool <tool_call"),
        (HERMES, "<tool_call>"),
        (HERMES, '<tool_call>\n{"name": "get_weather", "arguments": '),
        (HERMES, '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>'),
        (HERMES, '<tool_call>\n{"name": "get_", "arguments": {}}\n</tool_call>'),
        (HERMES, '<tool_call>\n{"name": "get", "arguments": "{}"}\n</tool_call>'),
        (HERMES, '<tool_call>\n{"name": "get", "arguments": [1]}\n</tool_call>'),
        (HERMES, '<tool_call>\n{"name": "get", "name": "get", "arguments": {}}\n</tool_call>'),
        (HERMES, '<tool_call>\n{"name": "get", "why": 1, "arguments": {}}\n</tool_call>'),
        (HERMES, '<tool_call>\n{"arguments": {"a": oops}, "name": "get"}\n</tool_call>'),
        (HERMES, '<tool_call>\n{"name": "\\u0067et", "arguments": {}}\n</tool_call>'),
        (HERMES, "<tool_call>\n<function=get>\n</function>\n</tool_call>"),
        (HERMES, "<tool_call>[]</tool_call>"),
        (HERMES, '{"name": "get", "arguments": {}}'),
        (MISTRAL, '[TOOL_CALLS] none, [{"name": "get", "arguments": {}}]'),
        (MISTRAL_NAMED, "[TOOL_CALLS]get_tim[ARGS]{}"),
        (MISTRAL_NAMED, "[TOOL_CALLS]get[ARG]{}"),
        (LLAMA, 'Sure: {"name": "get", "parameters": {}}'),
        (LLAMA, '[{"name": "get", "parameters": {}}]'),
        (LLAMA, '{"title": "get", "parameters": {}}'),
        (LLAMA, "<|python_tag|>print(1)"),
    ],
)
def test_what_is_no_call_stays_text(format, text):
    answer = parse(format, text)
    assert (answer.content, answer.calls) == (text, ())


def test_a_call_may_begin_within_what_was_none():
    call = f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}</tool_call>'
    assert brief(parse(HERMES, f"<tool_call>{call}")) == ("<tool_call>", [WEATHER_CALL])
    assert brief(parse(HERMES, f'<tool_call>{{"name": {call}')) == ('<tool_call>{"name":', [WEATHER_CALL])
    unclosed = call.removesuffix("</tool_call>")
    assert brief(parse(HERMES, unclosed + call)) == ("", [WEATHER_CALL] * 2)


def test_what_follows_a_call_and_does_not_fit_is_text():
    text = f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}, </tool_call>'
    assert brief(parse(HERMES, text)) == (", </tool_call>", [WEATHER_CALL])
    text = '[TOOL_CALLS][{"name": "get", "arguments": {}}, {"name": "unknown", "arguments": {}}]'
    assert brief(parse(MISTRAL, text)) == (', {"name": "unknown", "arguments": {}}]', [("get", "{}")])
    assert brief(parse(LLAMA, '{"name": "get", "parameters": {}} I think')) == (" I think", [("get", "{}")])


def test_arguments_that_break_end_the_call():
    for rest in ("None}}</tool_call>", "}}</tool_call>"):
        answer = parse(HERMES, f'<tool_call>{{"name": "get", "arguments": {{"key": {rest}')
        (call,) = answer.calls
        assert (call.name, call.arguments, call.complete) == ("get", '{"key": ', False)
        assert answer.content == rest


def test_arguments_that_are_cut_stay_as_they_are():
    events = stream(HERMES, ['<tool_call>{"name": "get", "arguments": {"key": "par'])
    assert events[1:] == [ArgumentsDelta(0, '{"key": "par'), ToolCallEnd(0, complete=False)]
    assert not collect_events(events).calls[0].complete
    assert not collect_events(events[:-1]).calls[0].complete


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_one_call_ends_the_answer(cut):
    call = f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}</tool_call>'
    text = f"Look: {call} and {call} and more"
    parser = ToolParser(HERMES, ONE)
    events = [event for start in range(0, len(text), cut) for event in parser.push(text[start : start + cut])]
    assert parser.finished
    assert brief(collect_events([*events, *parser.finish()])) == ("Look:", [WEATHER_CALL])


def test_only_tools_that_may_be_called():
    choice = ToolChoice(mode="named", tools=(GET,), parallel=False)
    text = f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}</tool_call>'
    assert brief(parse(HERMES, text, choice)) == (text, [])
    assert brief(parse(HERMES, text, NO_TOOLS)) == (text, [])
    assert brief(parse(HERMES, text, ToolChoice(mode="none", tools=TOOLS))) == (text, [])


class TestHolding:
    """Text is emitted as soon as it cannot belong to a call, arguments as soon as they arrive."""

    def test_text(self):
        parser = ToolParser(HERMES, AUTO, "r")
        assert parser.push("Hello wor") == [TextDelta("Hello wor")]
        assert parser.push("ld ") == [TextDelta("ld")]
        assert parser.push("<") == []
        assert parser.push("b>") == [TextDelta(" <b>")]
        assert parser.push("\n<tool_call>\n") == []
        assert parser.push("{'") == [TextDelta("\n<tool_call>\n{'")]

    def test_a_call(self):
        parser = ToolParser(HERMES, AUTO, "r")
        assert parser.push('<tool_call>\n{"name": "get", "arguments": ') == []
        assert parser.push("{") == [ToolCallStart(0, make_call_id("r", 0), "get"), ArgumentsDelta(0, "{")]
        assert parser.push('"key": "') == [ArgumentsDelta(0, '"key": "')]
        assert parser.push("a") == [ArgumentsDelta(0, "a")]
        assert parser.push('"}}\n</tool_call>') == [ArgumentsDelta(0, '"}'), ToolCallEnd(0, complete=True)]
        assert parser.push("\n") == []
        assert parser.finish() == []

    def test_a_name_that_no_tool_has(self):
        parser = ToolParser(HERMES, AUTO)
        assert parser.push('<tool_call>\n{"name": "get_w') == []
        assert parser.push("i") == [TextDelta('<tool_call>\n{"name": "get_wi')]

    def test_json_that_is_no_call(self):
        parser = ToolParser(LLAMA, AUTO)
        assert parser.push('{"n') == []
        assert parser.push("u") == [TextDelta('{"nu')]
        assert parser.push('mber": {"name": "get", "parameters": {}}') != []

    def test_without_tools_nothing_is_held(self):
        parser = ToolParser(HERMES, NO_TOOLS)
        assert parser.push("a <tool_call>") == [TextDelta("a <tool_call>")]
        assert parser.push("") == parser.finish() == []


def test_ids():
    text = '<tool_call>{"name": "get", "arguments": {}}</tool_call>' * 2
    first, second = parse(HERMES, text).calls
    assert first.id != second.id
    assert re.fullmatch("call_[0-9a-f]{24}", first.id)
    assert parse(HERMES, text).calls == (first, second), "the same request, made again"
    other = ToolParser(HERMES, AUTO, "another").push(text)
    assert first.id not in [event.id for event in other if isinstance(event, ToolCallStart)]
    drawn = ToolParser(HERMES, AUTO).push(text), ToolParser(HERMES, AUTO).push(text)
    assert drawn[0][0] != drawn[1][0], "without a source, ids are drawn at random"


@pytest.mark.parametrize(
    "cut", ["<tool_", "<tool_call>", '<tool_call>\n{"name": "get_', '<tool_call>\n{"name": "get", "arg']
)
def test_a_forced_call_that_is_cut_short_is_no_text(cut):
    forced = ToolParser(HERMES, parse_tool_choice("required", TOOLS))
    assert collect_events(forced.push(cut) + forced.finish()).content == ""
    free = ToolParser(HERMES, parse_tool_choice("auto", TOOLS))
    assert collect_events(free.push(cut) + free.finish()).content == cut
