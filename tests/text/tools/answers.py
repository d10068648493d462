"""Tools and answers with calls, for the tests of the parser and the grammar."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

from quire.text.tools.definitions import Tool, ToolChoice
from quire.text.tools.events import ArgumentsDelta, Event, ParsedOutput, TextDelta, collect_events
from quire.text.tools.formats import ToolFormat
from quire.text.tools.parser import ToolParser


def make(name: str, properties: dict[str, Any] | None = None, *, strict: bool = False, **schema: Any) -> Tool:
    parameters = {"type": "object", "properties": properties or {}, **schema}
    return Tool(name=name, description=f"does {name}", parameters=parameters, strict=strict)


WEATHER = make("get_weather", {"city": {"type": "string"}, "days": {"type": "integer"}}, required=["city"])
TIME = make("get_time")
GET = make("get", {"key": {"type": "string"}})
TOOLS = (WEATHER, TIME, GET)
AUTO = ToolChoice(mode="auto", tools=TOOLS)
ONE = ToolChoice(mode="auto", tools=TOOLS, parallel=False)


def merge(events: Iterable[Event]) -> list[Event]:
    """Neighbours of a kind as one."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            merged[-1] = TextDelta(last.text + event.text)
        elif isinstance(event, ArgumentsDelta) and isinstance(last, ArgumentsDelta) and event.index == last.index:
            merged[-1] = ArgumentsDelta(event.index, last.text + event.text)
        else:
            merged.append(event)
    return merged


def stream(format: ToolFormat, pieces: Iterable[str], choice: ToolChoice = AUTO) -> list[Event]:
    parser = ToolParser(format, choice, "request")
    return [*(event for piece in pieces for event in parser.push(piece)), *parser.finish()]


def parse(format: ToolFormat, text: str, choice: ToolChoice = AUTO) -> ParsedOutput:
    return collect_events(stream(format, [text], choice))


def brief(answer: ParsedOutput) -> tuple[str, list[tuple[str, str]]]:
    """Content, and names with arguments; every call must be complete."""
    assert all(call.complete for call in answer.calls)
    return answer.content, [(call.name, call.arguments) for call in answer.calls]


def random_value(chance: random.Random, depth: int = 3) -> Any:
    """A JSON value, with strings that look like what stands around calls."""
    kinds = ["text", "number", "literal"] + (["list", "object"] if depth else [])
    match chance.choice(kinds):
        case "text":
            return "".join(chance.choices(['"', "\\", "}", "{", "</tool_call>", "[", "]", "é", "\n", "a", " "], k=4))
        case "number":
            return chance.choice([0, -1, 12, 1.5, -2e-7, 10**20])
        case "literal":
            return chance.choice([True, False, None])
        case "list":
            return [random_value(chance, depth - 1) for _ in range(chance.randrange(3))]
    return random_object(chance, depth - 1)


def random_object(chance: random.Random, depth: int = 3) -> dict[str, Any]:
    keys = chance.sample(["city", "days", "key", "name", "arguments", "}", '"'], chance.randrange(4))
    return {key: random_value(chance, depth) for key in keys}


def write_arguments(chance: random.Random) -> str:
    layout = chance.choice([{}, {"indent": 2}, {"separators": (",", ":")}, {"ensure_ascii": False}])
    return json.dumps(random_object(chance), **layout)
