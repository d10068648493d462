"""The grammar of an answer that must hold calls, or whose calls must fit: Lark as llguidance reads it.

Whatever follows it, `ToolParser` takes in, and every call's arguments fit their tool's schema. Whether llguidance can
follow the schemas is found out by whoever compiles the grammar (`grammar_compiler.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from quire.text.tools.definitions import Tool, ToolChoice
from quire.text.tools.formats import ToolFormat

# As models are taught to write arguments: on one line, perhaps with a space behind a comma or colon.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_ANY_OBJECT = {"type": "object"}
_OPENS_MORE = ("additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref")
_ANYTHING = "(?s:.*)"


def call_grammar(format: ToolFormat, choice: ToolChoice, special: Mapping[str, int] | None = None) -> str | None:
    """The grammar, or None where the model is as free as without one.

    A forced choice leaves no room for words beside the calls. Otherwise words may come first, and only the tools that
    are strict bind their arguments. `special` are the markers that are special tokens (`special_markers`).
    """
    if choice.mode == "none" or not (choice.is_forced or any(tool.strict for tool in choice.tools)):
        return None
    writer = _Writer(format, special or {})
    rules = [f"call: {' | '.join(f'call_{index}' for index in range(len(choice.tools)))}"]
    for index, tool in enumerate(choice.tools):
        schema = closed_schema(tool) if choice.is_forced or tool.strict else _ANY_OBJECT
        rules.append(
            f"call_{index}: {writer.text(format.head_of(tool.name))} arguments_{index} {writer.text(format.tail)}"
        )
        rules.append(f"arguments_{index}: %json {write_schema(schema)}")
    calls = writer.calls(choice.parallel)
    if choice.is_forced:
        return "\n".join([f"start: {writer.opening} {calls}", *rules, ""])
    return "\n".join([*writer.free_start(calls), *rules, ""])


def closed_schema(tool: Tool) -> Mapping[str, Any]:
    """The tool's schema. One that lists properties and says no more takes no others: the model is not to invent any."""
    schema = tool.parameters
    listed = schema.get("properties")
    if listed is None or any(key in schema for key in _OPENS_MORE) or set(schema.get("required", ())) - set(listed):
        return schema
    return {**schema, "additionalProperties": False}


def write_schema(schema: Mapping[str, Any]) -> str:
    """On one line and in ASCII, so that nothing in it can be taken for the grammar around it."""
    return json.dumps({**schema, "x-guidance": _LAYOUT}, allow_nan=False)


class _Writer:
    """Writes the texts of a format as symbols of a grammar."""

    def __init__(self, format: ToolFormat, special: Mapping[str, int]) -> None:
        self._format = format
        self._special = special
        self.opening = f"({self.text(format.opening)})?" if format.is_bare else self.text(format.opening)

    def text(self, text: str) -> str:
        """A text as literals, and as tokens where it has special ones."""
        parts = re.split(f"({'|'.join(map(re.escape, self._special))})", text) if self._special else [text]
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part) for part in parts if part
        )

    def calls(self, parallel: bool) -> str:
        """The calls, from behind the first opening to the end."""
        format = self._format
        closing, between = self.text(format.closing), self.text(format.between)
        if format.is_list:
            more = f"({between} call)*" if parallel else ""
            return f'"[" call {more} "]" {closing}'
        again = "" if format.is_bare else self.opening
        more = f"({between} {again} call {closing})*" if parallel else ""
        return f"call {closing} {more}"

    def free_start(self, calls: str) -> list[str]:
        """Words, or calls, or words and then calls. Words are whatever the parser does not take for a call."""
        opening = self._format.opening
        kept_out = [f"{_ANYTHING}{re.escape(opening)}{_ANYTHING}"]
        if self._format.is_bare:
            kept_out.append(rf"[ \t\r\n]*\{{{_ANYTHING}")
        words = " & ".join(["/(?s:.+)/", *(f"~/{pattern}/" for pattern in kept_out)])
        if self._format.is_bare:
            return [f"start: WORDS | {self.opening} {calls}", f"WORDS: {words}"]
        if opening in self._special:
            return [f"start: WORDS | WORDS? {self.opening} {calls}", f"WORDS: {words}"]
        # Words up to the opening must be one lexeme with it: on their own they would swallow its first characters.
        return [
            f"start: WORDS | opened {calls}",
            f"opened[lazy]: /{_ANYTHING}{re.escape(opening)}/",
            f"WORDS: {words}",
        ]
