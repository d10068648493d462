"""Tool and ToolChoice: the tools of a request, and which of them the model may or must call.

`parse_tools` and `parse_tool_choice` read OpenAI's `tools` and `tool_choice`. An error names the path of the field.
How a model writes a call is `formats.py`; parsing calls from an answer is `parser.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quire.errors import InvalidParams, UnknownField, kind, show

MAX_TOOLS = 128

Mode = Literal["none", "auto", "required", "named"]

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function of the client that the model may call. `parameters` is the JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool  # whether a call must fit the schema even if the model need not call

    def to_openai(self) -> dict[str, Any]:
        """The tool in OpenAI's form, which chat templates expect."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Which tools the model may or must call.

    mode      none: no calls; auto: the model decides; required: at least one call; named: one call of the one tool
    tools     the tools that may be called; the prompt may show more
    parallel  whether there may be several calls
    """

    mode: Mode
    tools: tuple[Tool, ...]
    parallel: bool = True

    @property
    def is_forced(self) -> bool:
        return self.mode in ("required", "named")


NO_TOOLS = ToolChoice(mode="none", tools=())


def make_tool(
    where: str,
    *,
    name: object,
    description: object = None,
    parameters: object = None,
    strict: object = None,
    schema_field: str = "parameters",
) -> Tool:
    """Make a tool and check it. `where` is its path in the request, for errors."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidParams(
            f"{where}.name is {show(name)}; give 1 to 64 letters, digits, underscores or dashes.", f"{where}.name"
        )
    if description is not None and not isinstance(description, str):
        raise InvalidParams(f"{where}.description is {kind(description)}; give text.", f"{where}.description")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidParams(f"{where}.strict is {show(strict)}; give true or false.", f"{where}.strict")
    schema = {"type": "object", "properties": {}} if parameters is None else parameters
    _check_schema(f"{where}.{schema_field}", schema)
    assert isinstance(schema, Mapping)
    return Tool(name=name, description=description or "", parameters=schema, strict=bool(strict))


def parse_tools(value: object, where: str = "tools", *, strict: bool = False) -> tuple[Tool, ...]:
    """Parse OpenAI's `tools`. The function is a nested object (chat) or lies beside the type (responses).

    `strict` is the default for a tool that does not specify it.
    """
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise InvalidParams(f"{where} is {kind(value)}; give a list of tools.", where)
    return check_tools([_read_tool(entry, f"{where}[{index}]", strict) for index, entry in enumerate(value)], where)


def check_tools(tools: Sequence[Tool], where: str = "tools") -> tuple[Tool, ...]:
    """Check the tools of one request: their number, and that their names differ."""
    if len(tools) > MAX_TOOLS:
        raise InvalidParams(f"{where} holds {len(tools)} tools; give at most {MAX_TOOLS}.", where)
    first: dict[str, int] = {}
    for index, tool in enumerate(tools):
        if first.setdefault(tool.name, index) != index:
            raise InvalidParams(
                f"{where}[{index}] has the name {tool.name!r} of {where}[{first[tool.name]}]; rename it."
            )
    return tuple(tools)


def parse_tool_choice(
    value: object, tools: Sequence[Tool], parallel: bool | None = None, where: str = "tool_choice"
) -> ToolChoice:
    """Parse OpenAI's `tool_choice` and `parallel_tool_calls`. The default is auto if there are tools."""
    several = parallel is not False
    if value is None:
        value = "auto" if tools else "none"
    if isinstance(value, Mapping):
        return _read_object_choice(value, tools, several, where)
    match value:
        case "none":
            return NO_TOOLS
        case "auto":
            return ToolChoice(mode="auto", tools=tuple(tools), parallel=several) if tools else NO_TOOLS
        case "required" if tools:
            return ToolChoice(mode="required", tools=tuple(tools), parallel=several)
        case "required":
            raise InvalidParams(f"{where} is 'required', but the request has no tools; give some.", where)
    raise InvalidParams(
        f"{where} is {show(value)}; give 'none', 'auto', 'required' or an object that names a function.", where
    )


def force_tool(name: object, where: str, tools: Sequence[Tool]) -> ToolChoice:
    """A choice of exactly one call of this tool. `where` is the path of the name in the request."""
    return ToolChoice(mode="named", tools=(_find(name, where, tools),), parallel=False)


def _read_tool(entry: object, where: str, strict: bool) -> Tool:
    if not isinstance(entry, Mapping):
        raise InvalidParams(f"{where} is {kind(entry)}; a tool is an object with a type.", where)
    if entry.get("type") != "function":
        raise InvalidParams(
            f"{where}.type is {show(entry.get('type'))}; functions are the only tools here: 'function'.",
            f"{where}.type",
        )
    if "function" in entry:
        UnknownField.check(where, entry, ("type", "function"))
        function, where = entry["function"], f"{where}.function"
        if not isinstance(function, Mapping):
            raise InvalidParams(f"{where} is {kind(function)}; give an object with a name and parameters.", where)
    else:
        function = {key: item for key, item in entry.items() if key != "type"}
    UnknownField.check(where, function, _FUNCTION_FIELDS)
    given = {"name": None, "strict": strict, **{key: item for key, item in function.items() if item is not None}}
    return make_tool(where, **given)


def _check_schema(where: str, schema: object) -> None:
    if not isinstance(schema, Mapping):
        raise InvalidParams(f"{where} is {kind(schema)}; give a JSON schema, as an object.", where)
    if schema.get("type") != "object":
        raise InvalidParams(
            f"{where}.type is {show(schema.get('type'))}; arguments are an object: give 'object'.", f"{where}.type"
        )
    if not isinstance(schema.get("properties", {}), Mapping):
        raise InvalidParams(
            f"{where}.properties is {kind(schema['properties'])}; give an object of schemas.", f"{where}.properties"
        )
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise InvalidParams(f"{where}.required is {show(required)}; give a list of names.", f"{where}.required")
    try:
        json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParams(
            f"{where} cannot be written as JSON ({error}); give plain JSON, not nested deeply."
        ) from None


def _read_object_choice(value: Mapping[str, Any], tools: Sequence[Tool], several: bool, where: str) -> ToolChoice:
    match value.get("type"):
        case "function":
            return force_tool(*_named_in(value, where), tools)
        case "allowed_tools":
            return _read_allowed(value, tools, several, where)
    raise InvalidParams(
        f"{where}.type is {show(value.get('type'))}; give 'function' or 'allowed_tools'.", f"{where}.type"
    )


def _read_allowed(value: Mapping[str, Any], tools: Sequence[Tool], several: bool, where: str) -> ToolChoice:
    if "allowed_tools" in value:
        UnknownField.check(where, value, ("type", "allowed_tools"))
        value, where = value["allowed_tools"], f"{where}.allowed_tools"
        if not isinstance(value, Mapping):
            raise InvalidParams(f"{where} is {kind(value)}; give an object with a mode and tools.", where)
    UnknownField.check(where, value, ("type", "mode", "tools"))
    mode, entries = value.get("mode"), value.get("tools")
    if mode not in ("auto", "required"):
        raise InvalidParams(f"{where}.mode is {show(mode)}; give 'auto' or 'required'.", f"{where}.mode")
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise InvalidParams(
            f"{where}.tools is {show(entries)}; give a list that names at least one function.", f"{where}.tools"
        )
    found = [_find(*_named_in(entry, f"{where}.tools[{index}]"), tools) for index, entry in enumerate(entries)]
    names = {tool.name for tool in found}
    return ToolChoice(mode=mode, tools=tuple(tool for tool in tools if tool.name in names), parallel=several)


def _named_in(value: object, where: str) -> tuple[object, str]:
    """The name of a function in an object that refers to it, and the path of that name."""
    if not isinstance(value, Mapping) or value.get("type") != "function":
        raise InvalidParams(
            f'{where} is {show(value)}; give {{"type": "function", ...}} with the name of a tool.', where
        )
    if "function" not in value:
        UnknownField.check(where, value, ("type", "name"))
        return value.get("name"), f"{where}.name"
    UnknownField.check(where, value, ("type", "function"))
    function = value["function"]
    if not isinstance(function, Mapping):
        raise InvalidParams(f"{where}.function is {kind(function)}; give an object with a name.", f"{where}.function")
    UnknownField.check(f"{where}.function", function, ("name",))
    return function.get("name"), f"{where}.function.name"


def _find(name: object, where: str, tools: Sequence[Tool]) -> Tool:
    for tool in tools:
        if tool.name == name:
            return tool
    raise InvalidParams(
        f"{where} is {show(name)}, which none of the {len(tools)} tools has for a name; name one of them.", where
    )
