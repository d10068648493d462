"""StructuredOutputs: one kind, checked and bounded when it is made."""

from __future__ import annotations

import json

import pytest

from quire.core.params import SamplingParams, StructuredOutputs
from quire.core.request import Request
from quire.core.structured import MAX_CHOICES, MAX_GRAMMAR_BYTES, MAX_REGEX_BYTES, MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH
from quire.errors import BadGrammar, InvalidParams, UnknownField

pytestmark = pytest.mark.core


def nested(depth: int) -> dict:
    schema: dict = {"type": "integer"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def ring() -> dict:
    schema: dict = {}
    schema["items"] = schema
    return schema


@pytest.mark.parametrize(
    "options",
    [{}, {"json": {}, "regex": "a"}, {"choice": ["a"], "grammar": "start: A"}, {"json": None}, {"json": False}],
    ids=repr,
)
def test_exactly_one_kind(options) -> None:
    with pytest.raises(InvalidParams, match="exactly one of json, json_object, regex, choice, grammar"):
        StructuredOutputs(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"regex": 3},
        {"regex": ""},
        {"grammar": b"start: A"},
        {"choice": "yes"},
        {"choice": ["yes", 3]},
        {"choice": ["yes", ""]},
        {"json_object": 1},
        {"json_object": True, "disable_any_whitespace": "no"},
        {"regex": "a", "whitespace_pattern": " "},
        {"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True},
    ],
    ids=repr,
)
def test_values_of_the_wrong_kind(options) -> None:
    with pytest.raises(InvalidParams, match="structured_outputs"):
        StructuredOutputs(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"json": "{"}, "is not JSON"),
        ({"json": "[1]"}, "a schema is a JSON object"),
        ({"json": "false"}, "a schema is a JSON object"),
        ({"json": 3}, "give a schema"),
        ({"json": {"const": float("nan")}}, "cannot be written as JSON"),
        ({"json": {"const": object()}}, "cannot be written as JSON"),
        ({"json": ring()}, "cannot be written as JSON"),
        ({"json": {"const": "\ud800"}}, "half a character"),
        ({"json": nested(MAX_SCHEMA_DEPTH)}, "levels"),
        ({"json": nested(500)}, "64 levels are allowed"),
        ({"json": "[" * 100_000}, "deeper than can be read"),
        ({"json": {"const": "x" * (10 << 20)}}, f"{MAX_SCHEMA_BYTES:,} are allowed"),
        ({"regex": "a" * (MAX_REGEX_BYTES + 1)}, f"{MAX_REGEX_BYTES:,} are allowed"),
        ({"regex": "\udfff"}, "half a character"),
        ({"grammar": "start: " + "A" * MAX_GRAMMAR_BYTES}, f"{MAX_GRAMMAR_BYTES:,} are allowed"),
        ({"choice": []}, "has 0 texts"),
        ({"choice": list(map(str, range(MAX_CHOICES + 1)))}, f"from 1 to {MAX_CHOICES:,}"),
        ({"choice": ["x" * MAX_GRAMMAR_BYTES, "y"]}, "Shorten the texts"),
    ],
    ids=[str(number) for number in range(18)],
)
def test_what_is_too_much_or_broken_is_refused_with_the_limit(options, message) -> None:
    with pytest.raises(BadGrammar, match=message) as caught:
        StructuredOutputs(**options)
    assert caught.value.status == 400
    assert len(str(caught.value)) < 300


def test_the_deepest_and_the_largest_that_is_allowed() -> None:
    assert StructuredOutputs(json=nested(MAX_SCHEMA_DEPTH - 2)).schema
    assert StructuredOutputs(choice=list(map(str, range(MAX_CHOICES)))).choice


def test_a_schema_is_kept_as_text_with_its_properties_in_order() -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {}, "é": {}}}
    text = StructuredOutputs(json=schema).schema
    assert text is not None
    assert list(json.loads(text)["properties"]) == ["z", "a", "é"]
    assert StructuredOutputs(json=text).schema == text
    assert StructuredOutputs(json=True).schema == StructuredOutputs(json="true").schema == "{}"
    assert StructuredOutputs(json_object=True).schema == '{"type": "object"}'


def test_a_mapping_will_do_and_its_unknown_keys_are_named() -> None:
    params = SamplingParams(structured_outputs={"choice": ["a", "b", "a"]})  # type: ignore[arg-type]
    assert params.structured_outputs == StructuredOutputs(choice=("a", "b"))
    with pytest.raises(UnknownField, match="'chioce': did you mean 'choice'"):
        SamplingParams(structured_outputs={"chioce": ["a"]})  # type: ignore[arg-type]
    with pytest.raises(InvalidParams, match="give an object"):
        SamplingParams(structured_outputs="json")  # type: ignore[arg-type]


def test_the_likeliest_token_is_not_simply_taken() -> None:
    assert SamplingParams(temperature=0.0).argmax_only
    params = SamplingParams(temperature=0.0, structured_outputs=StructuredOutputs(regex="a"))
    assert not params.argmax_only
    assert not Request("a", [1], params).argmax_only
