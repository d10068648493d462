"""StructuredOutputs: the format that a user requires of an answer.

The constructor checks that exactly one kind is given and that it is within the size limits.
`text/grammar/constraint.py` makes a constraint of it, and raises if the schema, pattern or grammar is not supported.
Schemas are kept as JSON text, because SamplingParams are sent to the engine's process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from json import dumps, loads
from typing import Any

from quire.errors import BadGrammar, InvalidParams, UnknownField, kind, show

MAX_SCHEMA_BYTES = 256 << 10
MAX_SCHEMA_DEPTH = 64
MAX_REGEX_BYTES = 8 << 10
MAX_CHOICES = 4096
MAX_GRAMMAR_BYTES = 256 << 10  # also the limit for all choices together

KINDS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """Exactly one of the first five fields is given. The whole answer has that format, unless there is a frame.

    json                    a JSON value that fits this schema: a dict, its JSON text, or True for any value
    json_object             any JSON object
    regex                   a text that the whole pattern matches (Rust's syntax: no look-around, no back-references)
    choice                  one of these texts
    grammar                 a text of this grammar: Lark as llguidance reads it, or GBNF with `root ::= ...`
    whitespace_pattern      a pattern for whitespace between JSON tokens; None allows line breaks and indentation
    disable_any_whitespace  no whitespace between JSON tokens
    frame                   a Lark grammar around the format, which it refers to as `@answer`: for reasoning before it
    """

    json: str | Mapping[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    frame: str | None = None

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParams(
                    f"structured_outputs.{name} is {show(getattr(self, name))}; give true or false.",
                    f"structured_outputs.{name}",
                )
        given = [name for name in KINDS if getattr(self, name) is not None and getattr(self, name) is not False]
        if len(given) != 1:
            raise InvalidParams(
                f"structured_outputs has {' and '.join(given) or 'no format'}; give exactly one of {', '.join(KINDS)}."
            )
        self._check_whitespace()
        if self.json is not None:
            self._freeze("json", _schema_text(self.json))
        if self.regex is not None:
            _check_text("regex", self.regex, MAX_REGEX_BYTES)
        if self.grammar is not None:
            _check_text("grammar", self.grammar, MAX_GRAMMAR_BYTES)
        if self.frame is not None:
            _check_text("frame", self.frame, MAX_GRAMMAR_BYTES)
        if self.choice is not None:
            self._freeze("choice", _choices(self.choice))

    @classmethod
    def of(cls, value: object) -> StructuredOutputs:
        """The object itself, or one made from a mapping. An unknown key raises UnknownField with its name."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise InvalidParams(f"structured_outputs is {kind(value)}; give an object.", "structured_outputs")
        UnknownField.check("structured_outputs", map(str, value), [field.name for field in fields(cls)])
        return cls(**value)

    @property
    def schema(self) -> str | None:
        """The JSON schema as text, if the format is JSON."""
        if self.json_object:
            return '{"type": "object"}'
        assert self.json is None or isinstance(self.json, str)
        return self.json

    def _check_whitespace(self) -> None:
        is_given = self.whitespace_pattern is not None or self.disable_any_whitespace
        if is_given and self.json is None and not self.json_object:
            raise InvalidParams("structured_outputs has a whitespace option, which applies to JSON only; leave it out.")
        if self.whitespace_pattern is not None:
            if self.disable_any_whitespace:
                raise InvalidParams("structured_outputs has whitespace_pattern and disable_any_whitespace; give one.")
            _check_text("whitespace_pattern", self.whitespace_pattern, MAX_REGEX_BYTES)

    def _freeze(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _schema_text(value: object) -> str:
    """A schema as JSON text, from a mapping, JSON text or True."""
    if value is True:
        return "{}"
    text = value if isinstance(value, str) else _write(value)
    _check_text("json", text, MAX_SCHEMA_BYTES)
    parsed = _parse(text)
    if parsed is True:
        return "{}"
    if not isinstance(parsed, dict):
        raise BadGrammar(
            f"structured_outputs.json is {_shorten(text)}; a schema is a JSON object.", "structured_outputs.json"
        )
    if (depth := _depth(parsed)) > MAX_SCHEMA_DEPTH:
        raise _too_deep(f"{depth} levels deep")
    return text


def _write(value: object) -> str:
    if not isinstance(value, Mapping):
        raise BadGrammar(
            f"structured_outputs.json is {show(value)}; give a schema, its JSON text, or true.",
            "structured_outputs.json",
        )
    try:
        return dumps(value, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise BadGrammar(f"structured_outputs.json cannot be written as JSON: {error}.") from None
    except RecursionError:
        raise _too_deep("deeper than can be read") from None


def _parse(text: str) -> object:
    try:
        return loads(text)
    except ValueError as error:
        raise BadGrammar(f"structured_outputs.json is not JSON: {error}.", "structured_outputs.json") from None
    except RecursionError:
        raise _too_deep("deeper than can be read") from None


def _too_deep(depth: str) -> BadGrammar:
    return BadGrammar(
        f"structured_outputs.json nests {depth}; {MAX_SCHEMA_DEPTH} levels are allowed. "
        "Flatten it, or move subschemas to $defs."
    )


def _choices(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InvalidParams(
            f"structured_outputs.choice is {kind(value)}; give a list of texts.", "structured_outputs.choice"
        )
    if not 1 <= len(value) <= MAX_CHOICES:
        raise BadGrammar(
            f"structured_outputs.choice has {len(value):,} texts; give from 1 to {MAX_CHOICES:,}.",
            "structured_outputs.choice",
        )
    num_bytes = sum(_check_text("choice", text, MAX_GRAMMAR_BYTES) for text in value)
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise BadGrammar(
            f"structured_outputs.choice has {num_bytes:,} bytes; {MAX_GRAMMAR_BYTES:,} are allowed. Shorten the texts."
        )
    return tuple(dict.fromkeys(value))


def _check_text(name: str, text: object, max_bytes: int) -> int:
    """The number of bytes of a text. Raises if it is empty or too long."""
    if not isinstance(text, str) or not text:
        raise InvalidParams(
            f"structured_outputs.{name} holds {show(text)}; give a text that is not empty.",
            f"structured_outputs.{name}",
        )
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise BadGrammar(
            f"structured_outputs.{name} has a lone surrogate (half a character) at index {error.start}; remove it.",
            f"structured_outputs.{name}",
        ) from None
    if num_bytes > max_bytes:
        raise BadGrammar(
            f"structured_outputs.{name} has {num_bytes:,} bytes; {max_bytes:,} are allowed. Shorten it.",
            f"structured_outputs.{name}",
        )
    return num_bytes


def _depth(value: object) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [child for item in level for child in _children(item)]
    return depth


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:60] + "…"
