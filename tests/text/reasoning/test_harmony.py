"""HarmonyParser: channels become reasoning, text and calls; the template's capabilities; history as the format asks."""

from __future__ import annotations

import random

import pytest

from quire.errors import InvalidParams
from quire.text.answer_format import AnswerFormat
from quire.text.reasoning.harmony import HarmonyParser
from quire.text.templates.capabilities import detect_capabilities
from quire.text.templates.chat_template import ChatTemplate
from quire.text.templates.messages import prepare_messages
from quire.text.tools.definitions import NO_TOOLS, ToolChoice
from quire.text.tools.events import ParsedOutput, ToolCall, collect_events
from quire.text.tools.formats import HARMONY
from tests.text.tools.answers import AUTO, ONE, TOOLS

pytestmark = pytest.mark.cpu

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}'
# The parts of gpt-oss's template that matter here, in short.
TEMPLATE = (
    "{% if tools %}{{ tools[0].function.description }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' and m.tool_calls %}{% set c = m.tool_calls[0].function %}"
    "{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.content or m.thinking }}<|end|>"
    "<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>"
    "{{ c.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'tool' %}<|start|>functions.f to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def parse(text: str, choice: ToolChoice = AUTO, *, size: int = 1, in_final: bool = False) -> ParsedOutput:
    parser = HarmonyParser(choice, "", in_final=in_final)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    return collect_events([*(event for piece in pieces for event in parser.push(piece)), *parser.finish()])


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"{ANALYSIS}Hm <| a.{NEXT}{FINAL}It is <b>.", "Hm <| a.", "It is <b>."),
        (f"{FINAL}Yes.<|return|>", "", "Yes."),
        (f"{ANALYSIS}One{NEXT}{ANALYSIS}Two{NEXT}<|channel|>commentary<|message|>Wait.{NEXT}{FINAL}Yes.", "One\n\nTwo",
         "Wait.\n\nYes."),
        (f"{ANALYSIS}cut", "cut", ""),
        ("<|channel|>analysis", "", ""),
        (f"{ANALYSIS}a<|channel|>final<|message|>b", "a", "b"),
        (f"{ANALYSIS}a<|start|>assistant{FINAL}b", "a", "b"),
        ("Plain words.", "", "Plain words."),
        ("<|channel|>commentary to=browser.search<|message|>{}", "{}", ""),
        ("<|channel|>commentary to=functions.unknown<|message|>{}", "{}", ""),
        ("", "", ""),
    ],
)  # fmt: skip
def test_channels(text, reasoning, content, size):
    assert parse(text, size=size) == ParsedOutput(content, (), reasoning)


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
        " to=functions.get_weather<|channel|>commentary json<|message|>",
        "<|channel|>analysis to=functions.get_weather code<|message|>",
    ],
)
def test_calls(header, size):
    answer = parse(f'{ANALYSIS}Hm{NEXT}{header}{{"city": "Rome"}}', size=size)
    assert answer == ParsedOutput("", (ToolCall(answer.calls[0].id, "get_weather", '{"city": "Rome"}'),), "Hm")


def test_a_call_that_is_cut_is_not_complete_and_one_without_arguments_is():
    assert not parse(CALL[:-3]).calls[0].complete
    assert parse(CALL.partition("{")[0]).calls[0].arguments == "{}"


def test_one_call_ends_the_answer_where_one_is_allowed():
    again = f"{CALL}<|call|><|start|>assistant{CALL}<|call|>"
    assert len(parse(again, AUTO).calls) == 2
    assert len(parse(again, ONE).calls) == 1
    assert parse(CALL, NO_TOOLS).calls == ()


def test_a_long_text_without_a_message_is_text():
    words = "<|channel|>" + "x" * 2000
    assert parse(words, size=100).content.startswith("<|channel|>xxx")
    assert parse("y" * 2000).content == "y" * 2000


@pytest.mark.parametrize("in_final", [False, True])
@pytest.mark.parametrize("choice", [AUTO, ONE, NO_TOOLS])
def test_how_an_answer_is_divided_makes_no_difference(choice, in_final):
    rnd = random.Random(1)
    parts = [*HARMONY.markers, "analysis", "final", " to=functions.get_time", "{}", " ", "<|", "x" * 300, "Hi"]
    for _ in range(1000):
        text = "".join(rnd.choices(parts, k=rnd.randint(1, 14)))
        whole = parse(text, choice, size=len(text), in_final=in_final)
        for size in (1, rnd.randint(2, 40)):
            assert outline(parse(text, choice, size=size, in_final=in_final)) == outline(whole), text


def outline(answer: ParsedOutput) -> object:
    """All but the calls' ids, which are random."""
    calls = [(call.name, call.arguments, call.complete) for call in answer.calls]
    return answer.content, answer.reasoning, calls


def test_a_prefill_is_in_the_final_channel():
    format = AnswerFormat.of(detect_capabilities(ChatTemplate(TEMPLATE, {})), NO_TOOLS, "<|start|>assistant")
    assert format.phase == "either"
    text, behind = format.after_prefill("Sure")
    assert text == FINAL + "Sure"
    assert collect_events(behind.parser().push(", yes")).content == ", yes"


def test_the_template_is_recognized_and_gets_history_in_its_form():
    template = ChatTemplate(TEMPLATE, {})
    capabilities = detect_capabilities(template)
    assert (capabilities.format, capabilities.single_tool_call, capabilities.reasoning) == (HARMONY, True, None)
    call = {"id": "1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    history = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "A moment.", "reasoning": "A tool tells.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    prepared = prepare_messages(history, TOOLS, capabilities)
    text = template.render(prepared.messages, prepared.tools)
    assert "analysis<|message|>A tool tells.\n\nA moment.<|end|><|start|>assistant to=functions.get_time" in text
    assert text.endswith('<|message|>"noon"<|end|><|start|>assistant')


def test_the_reasoning_before_several_calls_is_rendered_once():
    template = ChatTemplate(TEMPLATE, {})
    calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in ("get", "get_time")
    ]
    history = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": None, "reasoning": "Both tools.", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in calls),
    ]
    prepared = prepare_messages(history, TOOLS, detect_capabilities(template))
    text = template.render(prepared.messages, prepared.tools)
    assert text.count("Both tools.") == 1
    assert text.index("Both tools.") < text.index("functions.get<") < text.index("functions.get_time<")


def test_reasoning_that_is_no_text_is_refused():
    message = {"role": "assistant", "content": "a", "reasoning_content": 3}
    with pytest.raises(InvalidParams, match=r"messages\[0\]\.reasoning_content is a number"):
        prepare_messages([message], (), detect_capabilities(None))
