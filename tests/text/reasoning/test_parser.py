"""ReasoningParser and the phase of a prompt: reasoning is split off, however the text arrives."""

from __future__ import annotations

import random

import pytest

from quire.text.answer_format import AnswerFormat
from quire.text.reasoning.formats import THINK, ReasoningFormat, detect_reasoning, prompt_phase
from quire.text.reasoning.parser import ReasoningParser
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.text.tools.definitions import NO_TOOLS, ToolChoice
from quire.text.tools.events import ParsedOutput, collect_events
from quire.text.tools.formats import HERMES
from quire.text.tools.parser import ToolParser
from tests.text.tools.answers import AUTO
from tests.text.vocabularies import byte_level

pytestmark = pytest.mark.cpu

CALL = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


def parse(text: str, phase: str = "either", *, size: int = 1, choice: ToolChoice = AUTO) -> ParsedOutput:
    parser = ReasoningParser(THINK, phase, ToolParser(HERMES, choice, ""))  # type: ignore[arg-type]
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    return collect_events([*(event for piece in pieces for event in parser.push(piece)), *parser.finish()])


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "phase", "reasoning", "content"),
    [
        ("<think>\nA < b.\n\nC\n</think>\n\nYes. ", "either", "A < b.\n\nC", "Yes. "),
        (" \n<think>a</think>b", "either", "a", "b"),
        ("a\n</think>\n\nb", "reasoning", "a", "b"),
        ("<think>a</think>b</think>c", "either", "a", "b</think>c"),
        ("Yes <think>a</think>", "either", "", "Yes <think>a</think>"),
        ("  Yes", "either", "", "  Yes"),
        ("<thin air", "either", "", "<thin air"),
        ("<thin", "either", "", "<thin"),
        ("", "either", "", ""),
        ("a </thi", "reasoning", "a </thi", ""),
        ("a \n", "reasoning", "a", ""),
        ("<think>\n\n</think>\n\nb", "either", "", "b"),
        ("<think>b", "answer", "", "<think>b"),
    ],
)
def test_splits(text, phase, reasoning, content, size):
    assert parse(text, phase, size=size) == ParsedOutput(content, (), reasoning)


@pytest.mark.parametrize("size", [1, 1000])
def test_calls_follow_reasoning_and_are_not_read_in_it(size):
    answer = parse(f"<think>I say {CALL}</think>\n{CALL}", size=size)
    assert answer.reasoning == f"I say {CALL}"
    assert [(call.name, call.complete) for call in answer.calls] == [("get_time", True)]
    assert answer.content == ""


def test_how_an_answer_is_divided_makes_no_difference():
    rnd = random.Random(1)
    parts = ["<think>", "</think>", "<thi", "</th", " ", "\n\n", "Hi", CALL, "<tool_call>", "{", "}"]
    for _ in range(1000):
        text, phase = "".join(rnd.choices(parts, k=rnd.randint(1, 12))), rnd.choice(["either", "reasoning", "answer"])
        whole, single = (parse(text, phase, size=size) for size in (len(text), 1))
        assert (single.reasoning, single.content, len(single.calls)) == (
            whole.reasoning,
            whole.content,
            len(whole.calls),
        ), text


def test_the_format_is_that_of_the_template():
    assert detect_reasoning("{{ '<think>' }} ... </think>") is THINK
    assert detect_reasoning("<think> alone") is None
    gemma = detect_reasoning(r"{{ '<|channel>thought\n' + text + '\n<channel|>' }}")
    assert gemma is not None
    assert gemma.closing == "<channel|>"


def test_the_end_of_the_prompt_says_what_is_open():
    assert prompt_phase(THINK, "user: <think></think>\nassistant:") == "either"
    assert prompt_phase(THINK, "assistant: <think>\n") == "reasoning"
    assert prompt_phase(THINK, "assistant: <think>\n\n</think>\n\n") == "answer"


def test_a_prefill_begins_the_answer_behind_the_reasoning():
    open_format = AnswerFormat(HERMES, NO_TOOLS, THINK, "reasoning")
    text, behind = open_format.after_prefill("Sure")
    assert (text, behind.phase) == ("\n</think>\n\nSure", "answer")
    assert open_format.after_prefill("") == ("", open_format)


def test_tokens_of_reasoning_are_counted_up_to_the_first_text():
    tokenizer = Tokenizer.from_gguf(byte_level())
    format = AnswerFormat(HERMES, NO_TOOLS, ReasoningFormat.of("<", ">"), "either")
    tokens = tokenizer.encode("<hello>hello hello")
    shown = next(index for index, token in enumerate(tokens) if tokenizer.token_bytes(token) == b">") + 1
    assert format.count_reasoning_tokens(tokens, tokenizer) == shown
    assert format.count_reasoning_tokens(tokens[:shown], tokenizer) == shown
    assert format.count_reasoning_tokens(tokens[shown:], tokenizer) == 0
