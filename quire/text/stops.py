"""Stop strings, sought in text that arrives in pieces.

One small automaton a string (Knuth, Morris and Pratt): a character costs the same however long the strings are, and how
much of a string has already been seen says how much text must be held back. Used by the detokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.errors import InvalidParams


@dataclass(frozen=True, slots=True)
class Found:
    """A stop string and where it ends in the characters that were scanned last."""

    stop: str
    end: int


class StopScanner:
    """Finds the stop string that ends first; of those that end together, the longest."""

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise InvalidParams(f"A stop string is empty or not text in {list(stops)!r}; give non-empty strings.")
        self._automata = [_Automaton(stop) for stop in sorted(set(stops), key=len, reverse=True)]

    @property
    def num_pending(self) -> int:
        """How many of the last characters may be the beginning of a stop string."""
        return max(automaton.num_matched for automaton in self._automata)

    def scan(self, characters: str, counts: bool) -> Found | None:
        """Go on with these characters. Unless it `counts`, a stop string that is completed here is passed over."""
        for end, character in enumerate(characters, 1):
            completed = [automaton.stop for automaton in self._automata if automaton.step(character)]
            if completed and counts:
                return Found(completed[0], end)
        return None


class _Automaton:
    """How much of one string the text ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._shorter = _borders(stop)

    def step(self, character: str) -> bool:
        """Take one character; True if it completes the string."""
        matched = self.num_matched
        while matched and self.stop[matched] != character:
            matched = self._shorter[matched - 1]
        matched += self.stop[matched] == character
        is_complete = matched == len(self.stop)
        self.num_matched = self._shorter[matched - 1] if is_complete else matched
        return is_complete


def _borders(text: str) -> list[int]:
    """For each prefix, the length of the longest shorter prefix that it also ends with."""
    borders = [0] * len(text)
    matched = 0
    for index in range(1, len(text)):
        while matched and text[matched] != text[index]:
            matched = borders[matched - 1]
        matched += text[matched] == text[index]
        borders[index] = matched
    return borders
