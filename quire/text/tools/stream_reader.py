"""Follows one JSON object through text that arrives in pieces: where it ends, and where it stops being JSON.

It builds no values. `tool_parser.py` uses it to let a call's arguments through while they are still being written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator
from typing import TypeVar

SPACE = " \t\r\n"
MAX_DEPTH = 100  # as deep as any reader of JSON follows

_DIGITS = "0123456789"
_HEX = _DIGITS + "abcdefABCDEF"
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}

# A number, by what has been read of it: the characters that may follow, and what has been read then.
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
_STEPS = {
    part: {character: after for characters, after in steps.items() for character in characters}
    for part, steps in _NUMBER.items()
}
_WHOLE_NUMBERS = frozenset({"zero", "whole", "fraction", "power"})
MAX_WORD = 256
END = ""  # stands for the character after the last one

_SPACES = re.compile(f"[{SPACE}]*")
_Value = TypeVar("_Value")
Reading = Generator[None, None, _Value]


class Mismatch(Exception):
    """A character that does not fit what is being read."""


class Cursor:
    """A place in a text."""

    def __init__(self) -> None:
        self.text = ""
        self.settled = 0  # what stands before this is dealt with
        self.position = 0  # of the next character to look at
        self.is_closed = False  # no more will come

    def extend(self, text: str) -> None:
        """More has come. Places in the text move with it: what is settled is dropped."""
        self.text = self.text[self.settled :] + text
        self.position -= self.settled
        self.settled = 0

    def settle(self, end: int) -> str:
        """Be done with the text up to `end`, and go on from there."""
        done = self.text[self.settled : end]
        self.settled = self.position = end
        return done

    def end_of_space(self, start: int) -> int:
        found = _SPACES.match(self.text, start)
        assert found is not None
        return found.end()

    @property
    def at_end(self) -> bool:
        return self.is_closed and self.position == len(self.text)

    def peek(self) -> Reading[str]:
        """The next character."""
        while self.position == len(self.text):
            if self.is_closed:
                return END
            yield
        return self.text[self.position]

    def read(self, text: str) -> Reading[None]:
        """Exactly this."""
        for character in text:
            if (yield from self.peek()) != character:
                raise Mismatch
            self.position += 1

    def skip_space(self) -> Reading[None]:
        while (character := (yield from self.peek())) and character in SPACE:
            self.position += 1

    def read_word(self, choices: Collection[str] | None) -> Reading[str]:
        """A JSON string without escapes: one of the choices, if there are any."""
        yield from self.read('"')
        word = yield from self.read_until('"', choices)
        yield from self.read('"')
        return word

    def read_until(self, stop: str, choices: Collection[str] | None) -> Reading[str]:
        """What comes before a character. It fails as soon as no choice begins like that."""
        word = ""
        while (character := (yield from self.peek())) != stop:
            word += character
            fits = choices is None or any(choice.startswith(word) for choice in choices)
            if character in (END, "\\") or character < " " or len(word) > MAX_WORD or not fits:
                raise Mismatch
            self.position += 1
        if choices is not None and word not in choices:
            raise Mismatch
        return word

    def scan(self, scanner: ObjectScanner) -> Reading[str]:
        """As much of a JSON object as is there; nothing, if it does not go on."""
        yield from self.peek()
        start = self.position
        self.position = scanner.scan(self.text, start)
        return self.text[start : self.position]


class ObjectScanner:
    """What may come next is a method, `_next`: it takes a character and says whether it fits."""

    def __init__(self) -> None:
        self.done = False
        self._has_failed = False
        self._open: list[str] = []  # the brackets that will close what is open
        self._next: Callable[[str], bool] = self._begin
        self._is_key = False
        self._rest = ""  # of a literal or of the digits of an escape
        self._number = ""

    def scan(self, text: str, start: int) -> int:
        """Go on with `text` from `start`. Returns where the object ended, or the first character that cannot belong
        to it, or the end of the text. After such a character nothing belongs to it any more."""
        position = start
        while position < len(text) and not self.done and not self._has_failed:
            self._has_failed = not self._next(text[position])
            position += not self._has_failed
        return position

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
        elif character in _STEPS["sign"]:
            self._number, self._next = _STEPS["sign"][character], self._in_number
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
        after = _STEPS[self._number].get(character)
        if after is not None:
            self._number = after
            return True
        if self._number not in _WHOLE_NUMBERS:
            return False
        self._next = self._after_value
        return self._after_value(character)
