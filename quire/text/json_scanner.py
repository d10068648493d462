"""Follows one JSON object through text that arrives in pieces: where it ends, and where it stops being JSON.

It builds no values. `tool_parser.py` uses it to let a call's arguments through while they are still being written.
"""

from __future__ import annotations

from collections.abc import Callable

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
