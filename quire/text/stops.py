"""Stop strings, sought in text that arrives in pieces.

Characters at the end of the text that may be the beginning of a stop string are held back. They are all that a search
in the next piece needs to know of the text before it. Used by the detokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.errors import InvalidParams


@dataclass(frozen=True, slots=True)
class Found:
    """A stop string, and where it ends in the characters that were held and those that were scanned."""

    stop: str
    end: int


class StopScanner:
    """Finds the stop string that ends first; of those that end together, the longest."""

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise InvalidParams(f"A stop string is empty or not text in {list(stops)!r}; give non-empty strings.")
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._first_characters = frozenset(stop[0] for stop in stops)
        self.held = ""  # the longest end of the text that is the beginning of a stop string, but not all of one

    def scan(self, characters: str, counts: bool) -> Found | None:
        """Go on with these characters. Unless it `counts`, a stop string that is completed here is passed over."""
        if not self.held and self._first_characters.isdisjoint(characters):
            return None
        window = self.held + characters
        if counts and (found := self._find(window, len(self.held))) is not None:
            return found
        self.held = self._find_beginning(window)
        return None

    def _find(self, window: str, num_held: int) -> Found | None:
        """The first stop string that ends behind the characters that were held: before, it was passed over."""
        found: Found | None = None
        for stop in self._stops:
            start = window.find(stop, max(0, num_held + 1 - len(stop)))
            if start >= 0 and (found is None or start + len(stop) < found.end):
                found = Found(stop, start + len(stop))
        return found

    def _find_beginning(self, window: str) -> str:
        """The longest end of the window that a stop string begins with and is longer than."""
        longest = ""
        for stop in self._stops:
            start = window.find(stop[0], max(0, len(window) + 1 - len(stop)))
            while 0 <= start < len(window) - len(longest):
                if stop.startswith(window[start:]):
                    longest = window[start:]
                    break
                start = window.find(stop[0], start + 1)
        return longest
