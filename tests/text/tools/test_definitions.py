"""Tools and tool choices, parsed from requests."""

from __future__ import annotations

import re

import pytest

from quire.errors import InvalidParams, InvalidRequest, UnknownField
from quire.text.tools.definitions import MAX_TOOLS, NO_TOOLS, make_tool, parse_tool_choice, parse_tools
from tests.text.tools.answers import GET, TOOLS, WEATHER

pytestmark = pytest.mark.core


def entry(name: object = "f", **function: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, **function}}


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}


class TestReadTools:
    def test_nested_and_flat(self):
        nested = entry("f", description="d", parameters=SCHEMA, strict=True)
        flat = {"type": "function", **nested["function"]}
        (tool,) = parse_tools([nested])
        assert (tool.name, tool.description, tool.parameters, tool.strict) == ("f", "d", SCHEMA, True)
        assert parse_tools([flat]) == (tool,)
        assert tool.to_openai() == {
            "type": "function",
            "function": {"name": "f", "description": "d", "parameters": SCHEMA},
        }

    def test_what_is_left_out(self):
        (tool,) = parse_tools([entry(description=None, parameters=None, strict=None)])
        assert tool.parameters == {"type": "object", "properties": {}}
        assert (tool.description, tool.strict) == ("", False)
        assert parse_tools(None) == parse_tools([]) == ()

    def test_strict_unless_it_says_otherwise(self):
        tools = parse_tools([entry("a"), entry("b", strict=False), entry("c", strict=None)], strict=True)
        assert [tool.strict for tool in tools] == [True, False, True]

    @pytest.mark.parametrize(
        ("tools", "message"),
        [
            ("f", "tools is a string"),
            ([1], "tools[0] is a number"),
            ([{"type": "web_search"}], 'tools[0].type is "web_search"'),
            ([{}], "tools[0].type is null"),
            ([{"type": "function", "function": 1}], "tools[0].function is a number"),
            ([entry("a b")], 'tools[0].function.name is "a b"'),
            ([entry("")], 'tools[0].function.name is ""'),
            ([entry("x" * 65)], "1 to 64 letters"),
            ([entry("f\n")], 'tools[0].function.name is "f\\n"'),
            ([entry(7)], "tools[0].function.name is 7"),
            ([entry(None)], "tools[0].function.name is null"),
            ([{"type": "function", "description": "d"}], "tools[0].name is null"),
            ([entry(description=3)], "tools[0].function.description is a number"),
            ([entry(strict="yes")], 'tools[0].function.strict is "yes"'),
            ([entry(parameters=[])], "tools[0].function.parameters is an array"),
            ([entry(parameters={})], "tools[0].function.parameters.type is null"),
            ([entry(parameters={"type": "array"})], 'tools[0].function.parameters.type is "array"'),
            (
                [entry(parameters={"type": "object", "properties": []})],
                "tools[0].function.parameters.properties is an array",
            ),
            ([entry(parameters={"type": "object", "required": 5})], "tools[0].function.parameters.required is 5"),
            ([entry(parameters={"type": "object", "required": [[]]})], "tools[0].function.parameters.required is [[]]"),
            (
                [entry(parameters={"type": "object", "x": float("nan")})],
                "tools[0].function.parameters cannot be written",
            ),
            ([entry("a"), entry("b"), entry("a")], "tools[2] has the name 'a' of tools[0]"),
            ([entry(f"f{i}") for i in range(MAX_TOOLS + 1)], "tools holds 129 tools; give at most 128"),
        ],
    )
    def test_refusals_name_the_field(self, tools, message):
        with pytest.raises(InvalidParams, match=re.escape(message)):
            parse_tools(tools)

    def test_unknown_fields(self):
        with pytest.raises(UnknownField, match=re.escape("tools[0].function has no field 'parameter': did you mean")):
            parse_tools([entry(parameter=SCHEMA)])
        with pytest.raises(UnknownField, match=re.escape("tools[0] has no field 'name'")):
            parse_tools([{**entry(), "name": "f"}])

    def test_other_apis_name_the_schema_otherwise(self):
        with pytest.raises(InvalidParams, match=re.escape('tools[3].input_schema.type is "string"')):
            make_tool("tools[3]", name="f", parameters={"type": "string"}, schema_field="input_schema")


class TestReadChoice:
    def test_the_words(self):
        assert parse_tool_choice(None, TOOLS).mode == "auto"
        assert parse_tool_choice("auto", TOOLS).tools == TOOLS
        assert parse_tool_choice("required", TOOLS).is_forced
        assert parse_tool_choice("none", TOOLS) == NO_TOOLS

    def test_without_tools_there_are_no_calls(self):
        assert parse_tool_choice(None, ()) == parse_tool_choice("auto", ()) == parse_tool_choice("none", ()) == NO_TOOLS
        with pytest.raises(InvalidParams, match="no tools"):
            parse_tool_choice("required", ())

    def test_parallel(self):
        assert parse_tool_choice("auto", TOOLS, None).parallel
        assert parse_tool_choice("required", TOOLS, True).parallel
        assert not parse_tool_choice("auto", TOOLS, False).parallel

    @pytest.mark.parametrize("value", [entry("get"), {"type": "function", "name": "get"}])
    def test_a_named_function(self, value):
        choice = parse_tool_choice(value, TOOLS)
        assert (choice.mode, choice.tools, choice.parallel) == ("named", (GET,), False)

    @pytest.mark.parametrize(
        "value",
        [
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [entry("get"), entry("get_weather")]},
            },
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "get_weather"}, {"type": "function", "name": "get"}],
            },
        ],
    )
    def test_allowed_tools(self, value):
        choice = parse_tool_choice(value, TOOLS, False)
        assert (choice.mode, choice.tools, choice.parallel) == ("required", (WEATHER, GET), False)

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ("any", 'tool_choice is "any"'),
            (3, "tool_choice is 3"),
            ({}, "tool_choice.type is null"),
            ({"type": "custom"}, 'tool_choice.type is "custom"'),
            (entry("nope"), 'tool_choice.function.name is "nope", which none of the 3 tools has'),
            ({"type": "function"}, "tool_choice.name is null"),
            ({"type": "function", "function": "get"}, "tool_choice.function is a string"),
            ({"type": "function", "function": {"name": "get", "x": 1}}, "tool_choice.function has no field 'x'"),
            ({"type": "allowed_tools", "mode": "none", "tools": []}, 'tool_choice.mode is "none"'),
            ({"type": "allowed_tools", "mode": "auto", "tools": []}, "tool_choice.tools is []"),
            ({"type": "allowed_tools", "allowed_tools": 1}, "tool_choice.allowed_tools is a number"),
            (
                {"type": "allowed_tools", "mode": "auto", "tools": [entry("x")]},
                'tool_choice.tools[0].function.name is "x"',
            ),
            ({"type": "allowed_tools", "mode": "auto", "tools": ["get"]}, 'tool_choice.tools[0] is "get"'),
        ],
    )
    def test_refusals_name_the_field(self, value, message):
        with pytest.raises(InvalidRequest, match=re.escape(message)):
            parse_tool_choice(value, TOOLS)
