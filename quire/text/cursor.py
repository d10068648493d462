"""Text that arrives in pieces, read as if it were all there.

What reads is a generator: it looks at one character after the other and yields where the text is at its end for now, to
be resumed once there is more. Between what is settled and the position lies what may have to be read again in another
way. `tool_parser.py` reads calls with it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator
from typing import TypeVar

from quire.text.json_scanner import SPACE, ObjectScanner

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
