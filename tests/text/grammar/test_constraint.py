"""GrammarConstraint: it allows what was asked for, on tiny vocabularies, and it can start at any token."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Sequence

import jsonschema
import pytest

from quire.core.params import SamplingParams, StructuredOutputs
from quire.errors import BadGrammar, EngineError, UnsupportedModel
from quire.text.grammar.constraint import GrammarBackend, GrammarConstraint
from quire.text.input_processor import InputProcessor
from quire.text.tokenizers.tokenizer import Tokenizer
from tests.text.vocabularies import byte_level, sentencepiece

pytestmark = pytest.mark.cpu

TOKENIZERS = {"byte level": Tokenizer.from_gguf(byte_level()), "sentencepiece": Tokenizer.from_gguf(sentencepiece())}
PERSON = {
    "type": "object",
    "properties": {
        "hello": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["world", "word", None, 1.5]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["hello", "age", "kind"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "l": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
            "required": ["v", "l"],
            "additionalProperties": False,
        }
    },
}
SUMS = 'root ::= term (" + " term)*\nterm ::= [0-9]+ | "(" root ")"'
LARK = 'start: "hello" (" " WORD)+ "!"\nWORD: /[a-z]{1,4}/'


def grammars(name: str = "byte level", num_more: int = 7) -> GrammarBackend:
    """For a model that has more logits than its tokenizer has tokens."""
    tokenizer = TOKENIZERS[name]
    return GrammarBackend(tokenizer, tokenizer.vocab_size + num_more, tokenizer.end_token_ids)


def allowed(constraint: GrammarConstraint) -> list[int]:
    mask = constraint.allowed()
    return [token for token in range(8 * len(mask)) if mask[token >> 3] >> (token & 7) & 1]


def walk(constraint: GrammarConstraint, tokenizer: Tokenizer, rng: random.Random, most: int = 400) -> list[int]:
    """An answer of tokens drawn at random from what is allowed, the end token left out."""
    tokens: list[int] = []
    while len(tokens) < most:
        choices = allowed(constraint)
        assert choices, constraint.error
        ends = tokenizer.end_token_ids.intersection(choices)
        assert not ends or ends == {token for token in tokenizer.end_token_ids if token < tokenizer.vocab_size}
        if ends and (len(ends) == len(choices) or rng.random() < 0.3):
            constraint.advance(min(ends))
            assert set(allowed(constraint)) == ends
            return tokens
        token = rng.choice([choice for choice in choices if choice not in ends])
        constraint.advance(token)
        tokens.append(token)
    raise AssertionError("no end")


def text_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    return b"".join(tokenizer.pieces[token] for token in tokens).decode()


def accepts(spec: StructuredOutputs, text: str) -> bool:
    """Whether a text can be had: with the longest token at each place that is allowed there."""
    tokenizer, rest = TOKENIZERS["byte level"], text.encode()
    constraint = grammars().make_constraint(spec)
    while rest:
        fitting = [token for token in allowed(constraint) if rest.startswith(tokenizer.pieces[token])]
        if not fitting:
            return False
        longest = max(fitting, key=lambda token: len(tokenizer.pieces[token]))
        constraint.advance(longest)
        rest = rest.removeprefix(tokenizer.pieces[longest])
    return not tokenizer.end_token_ids.isdisjoint(allowed(constraint))


@pytest.mark.parametrize("name", TOKENIZERS)
class TestRandomAnswers:
    @pytest.mark.parametrize(
        "schema",
        [
            PERSON,
            {"type": "array", "items": {"type": "integer", "minimum": -3, "exclusiveMaximum": 4}, "maxItems": 4},
            {"type": "string", "pattern": "^h(el)+lo$"},
            {"anyOf": [{"const": {"a": [1, "é!"]}}, {"type": "boolean"}]},
        ],
        ids=["object", "array", "pattern", "const"],
    )
    @pytest.mark.parametrize("compact", [False, True], ids=["spaced", "compact"])
    def test_json(self, name: str, schema: dict, compact: bool) -> None:
        ours, tokenizer = grammars(name), TOKENIZERS[name]
        spec = StructuredOutputs(json=schema, disable_any_whitespace=compact)
        for seed in range(12):
            text = text_of(tokenizer, walk(ours.make_constraint(spec), tokenizer, random.Random(seed)))
            jsonschema.validate(json.loads(text), schema)
            if compact:
                assert not re.search(r"\s", re.sub(r'"(\\.|[^"\\])*"', "", text))

    @pytest.mark.parametrize("pattern", [r"(hello|wor)+ ?\d{2,4}", r"^a$", "(ab|c){3}", r"[^\n]{5}é"])
    def test_regex(self, name: str, pattern: str) -> None:
        ours, tokenizer = grammars(name), TOKENIZERS[name]
        for seed in range(12):
            text = text_of(
                tokenizer, walk(ours.make_constraint(StructuredOutputs(regex=pattern)), tokenizer, random.Random(seed))
            )
            assert re.fullmatch(pattern, text)

    def test_choice(self, name: str) -> None:
        ours, tokenizer = grammars(name), TOKENIZERS[name]
        choice = ["hello", "hello world", 'say "hi"', "back\\slash", "new\nline", "é 🙂", "<|im_end|>", "</s>"]
        spec = StructuredOutputs(choice=choice)
        texts = {
            text_of(tokenizer, walk(ours.make_constraint(spec), tokenizer, random.Random(seed))) for seed in range(150)
        }
        assert texts == set(choice)

    @pytest.mark.parametrize(
        ("grammar", "pattern"), [(SUMS, r"[0-9()+ ]+"), (LARK, r"hello( [a-z]{1,4})+!")], ids=["gbnf", "lark"]
    )
    def test_grammar(self, name: str, grammar: str, pattern: str) -> None:
        ours, tokenizer = grammars(name), TOKENIZERS[name]
        spec, rng = StructuredOutputs(grammar=grammar), random.Random(5)
        for _ in range(12):
            assert re.fullmatch(pattern, text_of(tokenizer, walk(ours.make_constraint(spec), tokenizer, rng)))

    def test_going_on_behind_any_token_is_going_on(self, name: str) -> None:
        ours, tokenizer = grammars(name), TOKENIZERS[name]
        for spec in (StructuredOutputs(json=PERSON), StructuredOutputs(choice=["hello world hello", "hello worldly"])):
            tokens = walk(ours.make_constraint(spec), tokenizer, random.Random(8))
            first = ours.make_constraint(spec)
            for count, token in enumerate([*tokens, min(tokenizer.end_token_ids)]):
                again = ours.make_constraint(spec, [*tokens, min(tokenizer.end_token_ids)][:count])
                assert again.allowed() == first.allowed()
                first.advance(token)


def test_the_end_is_allowed_exactly_where_the_grammar_may_end() -> None:
    tokenizer = TOKENIZERS["byte level"]
    ends, letter = tokenizer.end_token_ids, tokenizer.encode("a")[0]
    assert len(ends) > 1
    constraint = grammars().make_constraint(StructuredOutputs(regex="a{2,3}"))
    for expected in ({letter}, {letter}, {letter, *ends}, ends):
        assert set(allowed(constraint)) == expected
        constraint.advance(letter)


def test_ids_without_a_token_or_without_logits_are_never_allowed() -> None:
    tokenizer = TOKENIZERS["byte level"]
    anything = StructuredOutputs(regex=r"(?s:.)*")
    free = allowed(grammars(num_more=7).make_constraint(anything))
    assert max(free) < tokenizer.vocab_size
    few = GrammarBackend(tokenizer, 270, frozenset({256 + 12}))
    assert max(allowed(few.make_constraint(anything))) < 270
    assert {token for token in tokenizer.special_token_ids if token in free} == tokenizer.end_token_ids


def test_the_name_of_a_special_token_is_spelled_as_text() -> None:
    tokenizer = TOKENIZERS["byte level"]
    constraint = grammars().make_constraint(StructuredOutputs(choice=["<|im_start|>"]))
    tokens = walk(constraint, tokenizer, random.Random(0))
    assert text_of(tokenizer, tokens) == "<|im_start|>"
    assert tokenizer.special_token_ids.isdisjoint(tokens)


def test_a_grammar_may_name_a_special_token() -> None:
    tokenizer = TOKENIZERS["byte level"]
    constraint = grammars().make_constraint(StructuredOutputs(grammar='start: "h" <|x|> "d"'))
    special = tokenizer.token_to_id("<|x|>")
    assert special is not None
    assert walk(constraint, tokenizer, random.Random(0)) == [*tokenizer.encode("h"), special, *tokenizer.encode("d")]


def test_forced_text_is_spelled_as_the_tokenizer_spells_it() -> None:
    for name, tokenizer in TOKENIZERS.items():
        tokens = walk(grammars(name).make_constraint(StructuredOutputs(choice=["{hello"])), tokenizer, random.Random(0))
        assert tokens[1:] == [tokenizer.token_to_id("hello")], name


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ('{"v": 1, "l": null}', True),
        ('{"v":1,"l":{"v":-2,"l":null}}', True),
        ('{\n  "v": 1,\n  "l": null\n}', True),
        ('{"v": 1}', False),
        ('{"v": 1, "l": null, "x": 2}', False),
        (' {"v": 1, "l": null}', False),
        ('{"v":\n\n\n1, "l": null}', False),
        ('{"v": 01, "l": null}', False),
    ],
)
def test_a_recursive_schema(text: str, good: bool) -> None:
    assert accepts(StructuredOutputs(json=TREE), text) is good


def test_whitespace_is_what_was_asked_for() -> None:
    spec = StructuredOutputs(json={"type": "array"}, whitespace_pattern="~")
    assert accepts(spec, "[~1~,~2~]")
    assert not accepts(spec, "[ 1]")
    assert not accepts(StructuredOutputs(json={"type": "array"}, disable_any_whitespace=True), "[ 1]")


def test_any_json() -> None:
    for text in ('{"a": [1, null]}', "3", '"x"'):
        assert accepts(StructuredOutputs(json=True), text)
        assert accepts(StructuredOutputs(json_object=True), text) is text.startswith("{")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (StructuredOutputs(json={"type": "nope"}), "Invalid type: nope"),
        (StructuredOutputs(json={"not": {}}), 'Unimplemented keys: \\["not"\\]'),
        (StructuredOutputs(json={"$ref": "https://example.com/schema"}), "not present"),
        (StructuredOutputs(json={"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "no text fits"),
        (StructuredOutputs(json={"enum": []}), "Unsatisfiable"),
        (StructuredOutputs(regex="(a"), "unclosed group"),
        (StructuredOutputs(regex="(?=a)b"), "look-around"),
        (StructuredOutputs(grammar="start: nope"), 'unknown name: "nope"'),
        (StructuredOutputs(grammar='start: "a" <|nope|>'), "unknown special token"),
        (StructuredOutputs(grammar="root ::= nope"), "Rule 'nope' not found"),
        (StructuredOutputs(grammar="root ::= " + "(" * 5000 + '"a"' + ")" * 5000), "nests too deep"),
        (StructuredOutputs(grammar="start: a\na[temperature=0.1]: /a/"), "temperature=.*remove it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_followed_is_refused_with_the_reason(spec: StructuredOutputs, message: str) -> None:
    with pytest.raises(BadGrammar, match=message) as caught:
        grammars().make_constraint(spec)
    assert "\n" not in str(caught.value)


def test_formats_are_followed_where_json_schema_defines_them() -> None:
    date = {"type": "string", "format": "date"}
    assert accepts(StructuredOutputs(json=date), '"2024-02-29"')
    assert not accepts(StructuredOutputs(json=date), '"a"')
    remark = {
        "type": "object",
        "properties": {"format": {"type": "string", "format": "colour"}},
        "required": ["format"],
    }
    assert accepts(StructuredOutputs(json=remark), '{"format": "a"}')
    value = {"enum": [{"format": "colour"}]}
    assert accepts(StructuredOutputs(json=value), '{"format": "colour"}')
    with pytest.raises(BadGrammar, match="Unknown format: uri-template"):
        grammars().make_constraint(StructuredOutputs(json={"type": "string", "format": "uri-template"}))


def test_a_long_text_without_a_choice() -> None:
    """Longer than what is spelled at once, with a character across the border."""
    tokenizer = TOKENIZERS["byte level"]
    text = "hello é" * 700
    for spec in (StructuredOutputs(json={"const": text}), StructuredOutputs(regex="(hello é){700}")):
        tokens = walk(grammars().make_constraint(spec), tokenizer, random.Random(0), most=5000)
        assert text_of(tokenizer, tokens).strip('"') == text
        again = grammars().make_constraint(spec, tokens[:2500])
        assert [*tokens[:2500], *walk(again, tokenizer, random.Random(0), most=5000)] == tokens


def test_tokens_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(BadGrammar, match="The 2 tokens of the answer so far do not fit"):
        grammars().make_constraint(StructuredOutputs(choice=["hello"]), [3, 4])


def test_a_model_without_an_end_token() -> None:
    tokenizer = TOKENIZERS["byte level"]
    with pytest.raises(UnsupportedModel, match="no token that ends an answer"):
        GrammarBackend(tokenizer, tokenizer.vocab_size, frozenset()).make_constraint(StructuredOutputs(regex="a"))


def test_where_llguidance_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(EngineError, match="pip install llguidance"):
        grammars().make_constraint(StructuredOutputs(regex="a"))


def test_nobody_else_loads_llguidance() -> None:
    script = "import quire.llm, quire.text.grammar.checker, sys; sys.exit('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_every_sample_has_a_constraint_of_its_own() -> None:
    tokenizer = TOKENIZERS["byte level"]
    input_processor = InputProcessor(tokenizer, tokenizer.vocab_size, 100, grammars=grammars())
    params = SamplingParams(n=2, structured_outputs=StructuredOutputs(choice=["a", "b"]))
    first, second = (request.constraint for request in input_processor.process("hello", params).requests)
    assert isinstance(first, GrammarConstraint)
    assert isinstance(second, GrammarConstraint)
    before = second.allowed()
    first.advance(tokenizer.encode("a")[0])
    assert second.allowed() == before != first.allowed()
    assert InputProcessor(tokenizer, tokenizer.vocab_size, 100).process("hello", params).requests[0].constraint is None
    assert input_processor.process("hello", SamplingParams()).requests[0].constraint is None
