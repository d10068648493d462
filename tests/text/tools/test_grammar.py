"""Grammar of tool calls: random texts of it can be parsed, and their arguments fit the schemas."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import llguidance
import pytest

from quire.core.structured import StructuredOutputs
from quire.text.grammar.compiler import GrammarCompiler, TokenizerInfo
from quire.text.tools.definitions import NO_TOOLS, Tool, ToolChoice
from quire.text.tools.events import ParsedOutput
from quire.text.tools.formats import FORMATS, HERMES, LLAMA, ToolFormat
from quire.text.tools.grammar import tool_call_grammar
from tests.text.tools.answers import GET, TIME, WEATHER, make, parse

pytestmark = pytest.mark.cpu

MARKERS = tuple(dict.fromkeys(marker for format in FORMATS for marker in format.markers))
END = 256 + len(MARKERS)
SPECIAL = {marker: 256 + place for place, marker in enumerate(MARKERS)}

NESTED = make(
    "nested-tool_2",
    {
        "kind": {"enum": ["a", 'quote " and \\', "é\n", 1, None]},
        "items": {"type": "array", "items": {"$ref": "#/$defs/item"}, "maxItems": 2},
        "flag": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    required=["kind", "items"],
    **{"$defs": {"item": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}},
)
NASTY = '}"\n start: "x'
HOSTILE = make(
    "hostile",
    {NASTY: {"type": "integer", "description": '}}}\n\nstart: /.*/ // %json { "a" } <[1]> \u2028 \'"'}},
    required=[NASTY],
)
OPEN = Tool(name="open", description="", parameters={"type": "object"}, strict=False)
ALL = (WEATHER, TIME, GET, NESTED, HOSTILE, OPEN)


def vocabulary(is_special: bool) -> TokenizerInfo:
    """Each byte is a token; the markers are tokens too, and special ones if asked for."""
    tokens = [bytes([byte]) for byte in range(256)] + [marker.encode() for marker in MARKERS] + [b"<end>"]
    return TokenizerInfo(tokens, [*SPECIAL.values(), END] if is_special else [END], [END])


COMPILERS = {is_special: GrammarCompiler(vocabulary(is_special)) for is_special in (False, True)}
ENDINGS = [ord(character) for character in '"}]0,:']


def draw_text(grammar: str, seed: int, is_special: bool, num_free: int = 60) -> str:
    """Walk the grammar. After some tokens, take whatever brings an end nearer."""
    chance = random.Random(seed)
    matcher = COMPILERS[is_special].compile(StructuredOutputs(grammar=grammar))
    tokens: list[int] = []
    while len(tokens) < 4000:
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(END + 1) if mask[token >> 3] >> (token & 7) & 1]
        assert allowed, matcher.get_error()
        usual = [token for token in allowed if 32 <= token < 127 or token >= 256]
        token = chance.choice(usual if usual and chance.random() < 0.9 else allowed)
        if len(tokens) > num_free:
            token = next((token for token in [END, *ENDINGS] if token in allowed), token)
        if token == END:
            return b"".join(vocabulary(is_special).tokens[token] for token in tokens).decode()
        assert matcher.consume_token(token), matcher.get_error()
        tokens.append(token)
    raise AssertionError(f"no end to {grammar}")


def accepts(grammar: str, text: str) -> bool:
    matcher = COMPILERS[False].compile(StructuredOutputs(grammar=grammar))
    return bool(matcher.consume_tokens(list(text.encode())) and matcher.is_accepting())


def check_calls(answer: ParsedOutput, tools: tuple[Tool, ...]) -> None:
    schemas = {tool.name: tool.parameters for tool in tools}
    for call in answer.calls:
        assert call.complete
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])


@pytest.mark.parametrize("is_special", [False, True], ids=["plain", "special"])
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
class TestWalks:
    @pytest.mark.parametrize("seed", range(6))
    def test_required(self, format: ToolFormat, is_special: bool, seed: int):
        choice = ToolChoice(mode="required", tools=ALL)
        answer = parse(format, self.draw(format, choice, is_special, seed), choice)
        assert answer.calls
        assert answer.content == ""
        check_calls(answer, ALL)

    @pytest.mark.parametrize("tool", ALL, ids=lambda tool: tool.name)
    def test_named(self, format: ToolFormat, is_special: bool, tool: Tool):
        choice = ToolChoice(mode="named", tools=(tool,), parallel=False)
        answer = parse(format, self.draw(format, choice, is_special, seed=1), choice)
        assert ([call.name for call in answer.calls], answer.content) == ([tool.name], "")
        check_calls(answer, (tool,))

    @pytest.mark.parametrize("parallel", [False, True])
    @pytest.mark.parametrize("seed", range(4))
    def test_auto(self, format: ToolFormat, is_special: bool, parallel: bool, seed: int):
        strict = make("strict", {"n": {"type": "integer"}}, strict=True, required=["n"])
        choice = ToolChoice(mode="auto", tools=(strict, OPEN), parallel=parallel)
        answer = parse(format, self.draw(format, choice, is_special, seed), choice)
        check_calls(answer, (strict, OPEN))
        assert parallel or len(answer.calls) <= 1

    def draw(self, format: ToolFormat, choice: ToolChoice, is_special: bool, seed: int) -> str:
        grammar = tool_call_grammar(format, choice, self.special(format) if is_special else None)
        assert grammar is not None
        return draw_text(grammar, seed, is_special)

    @staticmethod
    def special(format: ToolFormat) -> dict[str, int]:
        return {marker: SPECIAL[marker] for marker in format.markers}


class TestAccepted:
    def grammar(self, format: ToolFormat = HERMES, **choice: Any) -> str:
        grammar = tool_call_grammar(format, ToolChoice(**{"tools": ALL, **choice}))
        assert grammar is not None
        return grammar

    def call(self, name: str, arguments: str) -> str:
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'

    def test_required(self):
        grammar = self.grammar(mode="required")
        paris, now = self.call("get_weather", '{"city": "Paris"}'), self.call("get_time", "{}")
        assert accepts(grammar, paris)
        assert accepts(grammar, self.call("get_weather", '{"city":"Paris","days":3}'))
        assert accepts(grammar, f"{paris}\n{now}\n{paris}")
        assert not accepts(grammar, "")
        assert not accepts(grammar, "No.")
        assert not accepts(grammar, f"Sure. {paris}")
        assert not accepts(grammar, self.call("unknown", "{}"))
        assert not accepts(grammar, self.call("get_weather", '{"days": 3}')), "city is missing"
        assert not accepts(grammar, self.call("get_weather", '{"city":  "Paris"}')), "a model could add spaces for ever"
        assert not accepts(grammar, self.call("get_time", '{"made": "up"}')), "it lists no such property"
        assert accepts(grammar, self.call("open", '{"any": ["thing"]}'))

    def test_one_call_only(self):
        now = self.call("get_time", "{}")
        grammar = self.grammar(mode="required", parallel=False)
        assert accepts(grammar, now)
        assert not accepts(grammar, f"{now}\n{now}")

    @pytest.mark.parametrize("parallel", [False, True])
    def test_auto(self, parallel):
        strict = make("strict", {"n": {"type": "integer"}}, strict=True)
        grammar = self.grammar(mode="auto", tools=(strict, GET), parallel=parallel)
        one = self.call("strict", '{"n": 1}')
        assert accepts(grammar, "Just words, a < b, <tool, {}.")
        assert accepts(grammar, one)
        assert accepts(grammar, f"Words\n\n{one}")
        assert accepts(grammar, f"Words\n\n{one}\n{one}") == parallel
        assert accepts(grammar, self.call("get", '{"other": [1]}')), "a tool that is not strict takes any object"
        assert not accepts(grammar, self.call("strict", '{"n": "1"}'))
        assert not accepts(grammar, "<tool_call>\nno")
        assert not accepts(grammar, f"{one} and words")

    def test_auto_where_a_call_has_no_opening(self):
        strict = make("strict", {"n": {"type": "integer"}}, strict=True)
        grammar = self.grammar(LLAMA, mode="auto", tools=(strict,))
        one = '{"name": "strict", "parameters": {"n": 1}}'
        assert accepts(grammar, "Words, {}, [1]")
        assert accepts(grammar, "[1]")
        assert accepts(grammar, one)
        assert accepts(grammar, f"<|python_tag|>{one}; {one}")
        assert not accepts(grammar, '{"name": "strict", "parameters": {"n": null}}')
        assert not accepts(grammar, ' \n{"a": 1}')
        assert not accepts(grammar, f"Words <|python_tag|>{one}")

    def test_nothing_to_enforce(self):
        assert tool_call_grammar(HERMES, NO_TOOLS) is None
        assert tool_call_grammar(HERMES, ToolChoice(mode="auto", tools=ALL)) is None

    def test_a_property_that_is_required_but_not_listed(self):
        tool = make("f", {"a": {"type": "integer"}}, required=["b"])
        grammar = self.grammar(mode="named", tools=(tool,), parallel=False)
        assert accepts(grammar, self.call("f", '{"a": 1, "b": null}'))

    def test_many_tools(self):
        tools = tuple(make(f"tool_{index}", {"n": {"type": "integer"}}) for index in range(128))
        grammar = tool_call_grammar(HERMES, ToolChoice(mode="required", tools=tools))
        assert accepts(grammar, self.call("tool_12", '{"n": 1}') + "\n" + self.call("tool_127", "{}"))
        assert not accepts(grammar, self.call("tool_128", "{}"))

    def test_a_schema_cannot_write_grammar(self):
        grammar = self.grammar(mode="named", tools=(HOSTILE,), parallel=False)
        assert not llguidance.LLMatcher.validate_grammar(grammar)
        key = json.dumps(NASTY)
        assert accepts(grammar, self.call("hostile", f"{{{key}: 1}}"))
        assert not accepts(grammar, "anything")
