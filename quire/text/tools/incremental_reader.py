"""Incremental reading of text that arrives in pieces. `parser.py` reads tool calls with it.

`IncrementalReader` provides generators that read one character after the other. A generator yields when it has reached
the end of the text so far, and is resumed when there is more. `JSONObjectScanner` finds the end of a JSON object, or
the character at which it stops being JSON, without building values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator
from typing import TypeVar

SPACE = " \t\r\n"
MAX_DEPTH = 100  # no deeper than common JSON parsers accept

_DIGITS = "0123456789"
_HEX = _DIGITS + "abcdefABCDEF"
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}

# The states of a number: for each state, the characters that may follow and the next state.
_NUMBER = {
    "sign": {"0": "zero", "123456789": "whole"},
    "zero": {".": "point", "eE": "exponent"},
    "whole": {_DIGITS: "whole", ".": "point", "eE": "exponent"},
    "point": {_DIGITS: "fraction"},
    "fraction": {_DIGITS: "fraction", "eE": "exponent"},
    "exponent": {"+-": "exponent sign", _DIGITS: "power"},
    "exponent sign": {_DIGITS: "power"},
    "power": {_DIGITS: "power"},
}
_TRANSITIONS = {
    state: {character: after for characters, after in transitions.items() for character in characters}
    for state, transitions in _NUMBER.items()
}
_FINAL_STATES = frozenset({"zero", "whole", "fraction", "power"})
MAX_WORD = 256
END = ""  # returned by `peek` at the end of the text

_SPACES = re.compile(f"[{SPACE}]*")
_Value = TypeVar("_Value")
Reading = Generator[None, None, _Value]


class Mismatch(Exception):
    """A character does not match what is being read."""


class IncrementalReader:
    """Reads a text that grows. Text before `consumed` is final; text up to `offset` may be read again."""

    def __init__(self) -> None:
        self.text = ""
        self.consumed = 0  # the text before this index is done
        self.offset = 0  # index of the next character
        self.is_closed = False  # the text is complete

    def extend(self, text: str) -> None:
        """Append text and drop consumed text. Both indices move accordingly."""
        self.text = self.text[self.consumed :] + text
        self.offset -= self.consumed
        self.consumed = 0

    def consume(self, end: int) -> str:
        """Consume the text up to `end` and return it."""
        done = self.text[self.consumed : end]
        self.consumed = self.offset = end
        return done

    def end_of_space(self, start: int) -> int:
        found = _SPACES.match(self.text, start)
        assert found is not None
        return found.end()

    @property
    def at_end(self) -> bool:
        return self.is_closed and self.offset == len(self.text)

    def peek(self) -> Reading[str]:
        """The next character, or END."""
        while self.offset == len(self.text):
            if self.is_closed:
                return END
            yield
        return self.text[self.offset]

    def read(self, text: str) -> Reading[None]:
        """Read exactly this text."""
        for character in text:
            if (yield from self.peek()) != character:
                raise Mismatch
            self.offset += 1

    def skip_space(self) -> Reading[None]:
        while (character := (yield from self.peek())) and character in SPACE:
            self.offset += 1

    def read_word(self, choices: Collection[str] | None) -> Reading[str]:
        """Read a JSON string without escapes. With choices, it must be one of them."""
        yield from self.read('"')
        word = yield from self.read_until('"', choices)
        yield from self.read('"')
        return word

    def read_until(self, stop: str, choices: Collection[str] | None) -> Reading[str]:
        """Read up to a character. Fails at the first character that matches none of the choices."""
        word = ""
        while (character := (yield from self.peek())) != stop:
            word += character
            fits = choices is None or any(choice.startswith(word) for choice in choices)
            if character in (END, "\\") or character < " " or len(word) > MAX_WORD or not fits:
                raise Mismatch
            self.offset += 1
        if choices is not None and word not in choices:
            raise Mismatch
        return word

    def scan(self, scanner: JSONObjectScanner) -> Reading[str]:
        """Read as much of a JSON object as has arrived. Empty if the next character does not continue it."""
        yield from self.peek()
        start = self.offset
        self.offset = scanner.scan(self.text, start)
        return self.text[start : self.offset]


class JSONObjectScanner:
    """A state machine. `_next` is the method of the current state: it takes a character and returns whether it fits."""

    def __init__(self) -> None:
        self.done = False
        self._has_failed = False
        self._open: list[str] = []  # the closing brackets of open objects and lists
        self._next: Callable[[str], bool] = self._begin
        self._is_key = False
        self._rest = ""  # of a literal, or of the digits of an escape
        self._number = ""

    def scan(self, text: str, start: int) -> int:
        """Scan `text` from `start`. Returns the index behind the object, of the first invalid character, or of the end
        of the text. After an invalid character nothing more is accepted.
        """
        offset = start
        while offset < len(text) and not self.done and not self._has_failed:
            self._has_failed = not self._next(text[offset])
            offset += not self._has_failed
        return offset

    def _begin(self, character: str) -> bool:
        return character == "{" and self._enter(character)

    def _enter(self, character: str) -> bool:
        if len(self._open) == MAX_DEPTH:
            return False
        self._open.append("}" if character == "{" else "]")
        self._next = self._first_key if character == "{" else self._first_item
        return True

    def _leave(self) -> bool:
        self._open.pop()
        self.done = not self._open
        self._next = self._after_value
        return True

    def _first_key(self, character: str) -> bool:
        return self._leave() if character == "}" else self._key(character)

    def _key(self, character: str) -> bool:
        if character == '"':
            self._is_key, self._next = True, self._string
            return True
        return character in SPACE

    def _colon(self, character: str) -> bool:
        if character == ":":
            self._next = self._value
            return True
        return character in SPACE

    def _first_item(self, character: str) -> bool:
        return self._leave() if character == "]" else self._value(character)

    def _value(self, character: str) -> bool:
        if character in SPACE:
            return True
        if character == '"':
            self._is_key, self._next = False, self._string
        elif character in "{[":
            return self._enter(character)
        elif character in _LITERALS:
            self._rest, self._next = _LITERALS[character], self._literal
        elif character == "-":
            self._number, self._next = "sign", self._in_number
        elif character in _TRANSITIONS["sign"]:
            self._number, self._next = _TRANSITIONS["sign"][character], self._in_number
        else:
            return False
        return True

    def _after_value(self, character: str) -> bool:
        if character == ",":
            self._next = self._key if self._open[-1] == "}" else self._value
            return True
        return self._leave() if character == self._open[-1] else character in SPACE

    def _string(self, character: str) -> bool:
        if character == '"':
            self._next = self._colon if self._is_key else self._after_value
        elif character == "\\":
            self._next = self._escape
        return character >= " "

    def _escape(self, character: str) -> bool:
        if character == "u":
            self._rest, self._next = "____", self._hexadecimal
            return True
        self._next = self._string
        return character in '"\\/bfnrt'

    def _hexadecimal(self, character: str) -> bool:
        self._rest = self._rest[1:]
        if not self._rest:
            self._next = self._string
        return character in _HEX

    def _literal(self, character: str) -> bool:
        expected, self._rest = self._rest[0], self._rest[1:]
        if not self._rest:
            self._next = self._after_value
        return character == expected

    def _in_number(self, character: str) -> bool:
        after = _TRANSITIONS[self._number].get(character)
        if after is not None:
            self._number = after
            return True
        if self._number not in _FINAL_STATES:
            return False
        self._next = self._after_value
        return self._after_value(character)
