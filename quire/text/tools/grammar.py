"""The grammar of an answer with tool calls, in llguidance's Lark.

It is used if a call is forced or a tool is strict. `ToolParser` can parse every answer of the grammar, and the
arguments of each call fit the tool's schema. Whether llguidance supports the schemas is checked when the grammar is
compiled (`text/grammar/compiler.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from quire.text.tools.definitions import Tool, ToolChoice
from quire.text.tools.formats import ToolFormat

# Models are trained on arguments in one line, with or without a space after a comma or colon.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_ANY_OBJECT = {"type": "object"}
_OPEN_KEYS = ("additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref")
_ANYTHING = "(?s:.*)"


def tool_call_grammar(format: ToolFormat, choice: ToolChoice, special: Mapping[str, int] | None = None) -> str | None:
    """The grammar, or None if the choice needs none.

    A forced choice allows calls only. Otherwise text may come first, and only the arguments of strict tools must fit
    their schema. `special` are the markers that are special tokens (`special_markers`).
    """
    if not needs_grammar(choice):
        return None
    writer = _Writer(format, special or {})
    rules = call_rules(format, choice, special or {})
    calls = writer.calls(choice.parallel)
    if choice.is_forced:
        return "\n".join([f"start: {writer.opening} {calls}", *rules, ""])
    return "\n".join([*writer.optional_start(calls), *rules, ""])


def needs_grammar(choice: ToolChoice) -> bool:
    return choice.mode != "none" and (choice.is_forced or any(tool.strict for tool in choice.tools))


def call_rules(format: ToolFormat, choice: ToolChoice, special: Mapping[str, int]) -> list[str]:
    """The rule `call`: one call, from after its opening to before its closing."""
    rules = [f"call: {' | '.join(f'call_{index}' for index in range(len(choice.tools)))}"]
    for index, tool in enumerate(choice.tools):
        schema = closed_schema(tool) if choice.is_forced or tool.strict else _ANY_OBJECT
        head, tail = (write_text(text, special) for text in (format.head_of(tool.name), format.tail))
        rules.append(f"call_{index}: {head} arguments_{index} {tail}")
        rules.append(f"arguments_{index}: %json {write_schema(schema)}")
    return rules


def write_text(text: str, special: Mapping[str, int]) -> str:
    """A text as literals of Lark, with special tokens as token ids."""
    pieces = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
    return " ".join(f"<[{special[piece]}]>" if piece in special else json.dumps(piece) for piece in pieces if piece)


def closed_schema(tool: Tool) -> Mapping[str, Any]:
    """The tool's schema. If it only lists properties, others are forbidden, so that the model invents none."""
    schema = tool.parameters
    listed = schema.get("properties")
    if listed is None or any(key in schema for key in _OPEN_KEYS) or set(schema.get("required", ())) - set(listed):
        return schema
    return {**schema, "additionalProperties": False}


def write_schema(schema: Mapping[str, Any]) -> str:
    """The schema as ASCII JSON in one line, so that nothing in it is parsed as Lark."""
    return json.dumps({**schema, "x-guidance": _LAYOUT}, allow_nan=False)


class _Writer:
    """Converts the texts of a format into Lark."""

    def __init__(self, format: ToolFormat, special: Mapping[str, int]) -> None:
        self._format = format
        self._special = special
        self.opening = f"({self.text(format.opening)})?" if format.is_bare else self.text(format.opening)

    def text(self, text: str) -> str:
        return write_text(text, self._special)

    def calls(self, parallel: bool) -> str:
        """The calls, from after the first opening to the end."""
        format = self._format
        closing, between = self.text(format.closing), self.text(format.between)
        if format.is_list:
            more = f"({between} call)*" if parallel else ""
            return f'"[" call {more} "]" {closing}'
        again = "" if format.is_bare else self.opening
        more = f"({between} {again} call {closing})*" if parallel else ""
        return f"call {closing} {more}"

    def optional_start(self, calls: str) -> list[str]:
        """Rules for text, calls, or text and then calls. Text is what the parser does not parse as a call."""
        opening = self._format.opening
        excluded = [f"{_ANYTHING}{re.escape(opening)}{_ANYTHING}"]
        if self._format.is_bare:
            excluded.append(rf"[ \t\r\n]*\{{{_ANYTHING}")
        words = " & ".join(["/(?s:.+)/", *(f"~/{pattern}/" for pattern in excluded)])
        if self._format.is_bare:
            return [f"start: WORDS | {self.opening} {calls}", f"WORDS: {words}"]
        if opening in self._special:
            return [f"start: WORDS | WORDS? {self.opening} {calls}", f"WORDS: {words}"]
        # The text before the opening is one lexeme with it. On its own it would consume the opening's first characters.
        return [
            f"start: WORDS | opened {calls}",
            f"opened[lazy]: /{_ANYTHING}{re.escape(opening)}/",
            f"WORDS: {words}",
        ]
