"""Grammars of answers with reasoning: only what follows the reasoning has the format; calls fit their tools."""

from __future__ import annotations

from typing import Any

import pytest

from quire.core.structured import StructuredOutputs
from quire.errors import InvalidParams
from quire.text.answer_format import AnswerFormat
from quire.text.grammar.compiler import GrammarCompiler, TokenizerInfo
from quire.text.reasoning.formats import THINK
from quire.text.tools.definitions import NO_TOOLS, ToolChoice, parse_tool_choice
from quire.text.tools.formats import HARMONY, HERMES
from tests.text.tools.answers import TOOLS, make

pytestmark = pytest.mark.cpu

MARKERS = (*HARMONY.markers, "<think>", "</think>")
IDS = {marker: 256 + place for place, marker in enumerate(MARKERS)}
END = 256 + len(MARKERS)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ANALYSIS = "<|channel|>analysis<|message|>Hm {<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}'


class Vocabulary:
    """Each byte is a token, and so are the markers, which are special or not."""

    def __init__(self, is_special: bool) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [marker.encode() for marker in MARKERS] + [b"<end>"]
        self.special_token_ids = frozenset(IDS.values()) if is_special else frozenset()
        self.compiler = GrammarCompiler(TokenizerInfo(self.tokens, [*self.special_token_ids, END], [END]))

    def token_to_id(self, text: str) -> int | None:
        return IDS.get(text)

    def accepts(self, structured: dict[str, Any], text: str) -> bool:
        matcher = self.compiler.compile(StructuredOutputs.of(structured))
        return bool(matcher.consume_tokens(self.encode(text)) and matcher.is_accepting())

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            found = next((each for each in MARKERS if text.startswith(each)), None) if self.special_token_ids else None
            ids += [IDS[found]] if found else text[0].encode()
            text = text[len(found or text[0]) :]
        return ids


VOCABULARIES = {is_special: Vocabulary(is_special) for is_special in (False, True)}


def structured(format: AnswerFormat, vocabulary: Vocabulary, required: dict[str, Any] | None = None) -> dict[str, Any]:
    made = format.structured_outputs(required, vocabulary)  # type: ignore[arg-type]
    assert made is not None
    return made


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize(
    "required",
    [{"json": SCHEMA}, {"regex": r'\{"a": \d\}'}, {"choice": ['{"a": 1}']}, {"grammar": 'start: "{\\"a\\": 1}"'}],
)
def test_the_format_begins_behind_the_reasoning(required, is_special):
    vocabulary = VOCABULARIES[is_special]
    texts = {
        '<think>Hm {</think>\n\n{"a": 1}',
        'Hm {</think>{"a": 1}',
        '{"a": 1}',
        "<think>Hm",
        "Hm",
        "<think>x</think>b",
    }
    allowed = {
        "either": {'<think>Hm {</think>\n\n{"a": 1}', '{"a": 1}'},
        "reasoning": {'Hm {</think>{"a": 1}'} | (set() if is_special else {'<think>Hm {</think>\n\n{"a": 1}'}),
        "answer": {'{"a": 1}'},
    }
    for phase, fitting in allowed.items():
        format = AnswerFormat(HERMES, NO_TOOLS, THINK, phase)  # type: ignore[arg-type]
        made = structured(format, vocabulary, required)
        assert {text for text in texts if vocabulary.accepts(made, text)} == fitting, phase


@pytest.mark.parametrize("is_special", [False, True])
def test_harmony_has_the_format_in_its_final_channel(is_special):
    vocabulary = VOCABULARIES[is_special]
    made = structured(AnswerFormat(HARMONY, NO_TOOLS, None, "either"), vocabulary, {"json": SCHEMA})
    for text in (f'{ANALYSIS}{FINAL}{{"a": 1}}', '<|channel|>final <|constrain|>json<|message|>{"a": 1}'):
        assert vocabulary.accepts(made, text), text
    for text in ('{"a": 1}', f"{ANALYSIS}{FINAL}Yes", ANALYSIS):
        assert not vocabulary.accepts(made, text), text
    begun = structured(AnswerFormat(HARMONY, NO_TOOLS, None, "answer"), vocabulary, {"json": SCHEMA})
    assert vocabulary.accepts(begun, '{"a": 1}')


@pytest.mark.parametrize("is_special", [False, True])
def test_harmony_calls(is_special):
    vocabulary = VOCABULARIES[is_special]
    strict = ToolChoice(mode="auto", tools=(make("get_weather", {"city": {"type": "string"}}, strict=True),))
    forced = parse_tool_choice("required", TOOLS)
    for choice in (strict, forced):
        made = structured(AnswerFormat(HARMONY, choice, None, "either"), vocabulary)
        assert vocabulary.accepts(made, CALL)
        assert vocabulary.accepts(made, ANALYSIS + CALL)
        assert not vocabulary.accepts(made, CALL.replace("city", "town"))
        assert vocabulary.accepts(made, f"{ANALYSIS}{FINAL}Yes") == (choice is strict)
    free = AnswerFormat(HARMONY, ToolChoice(mode="auto", tools=TOOLS), None, "either")
    assert free.structured_outputs(None, vocabulary) is None  # type: ignore[arg-type]


def test_a_forced_call_may_be_reasoned_about():
    vocabulary = VOCABULARIES[False]
    format = AnswerFormat(HERMES, parse_tool_choice("required", TOOLS), THINK, "reasoning")
    call = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    assert vocabulary.accepts(structured(format, vocabulary), f"Hm</think>\n{call}")


def test_a_frame_of_the_request_is_refused_where_the_model_reasons():
    format = AnswerFormat(HERMES, NO_TOOLS, THINK, "either")
    with pytest.raises(InvalidParams, match="frame"):
        format.structured_outputs({"json": SCHEMA, "frame": "start: @answer"}, VOCABULARIES[False])  # type: ignore[arg-type]
