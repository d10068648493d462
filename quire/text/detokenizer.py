"""Tokens to text while they arrive.

A `Detokenizer` belongs to one answer. It gives out text as soon as nothing that comes later can change it: half a
UTF-8 character waits for its other half, and whatever may grow into a stop string waits until it has or cannot. The
work for a token does not depend on how long the answer already is.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from quire.errors import InvalidParams
from quire.text.tokenizers.tokenizer import Tokenizer


class Detokenizer:
    """Turns pushed tokens into text that is safe to show.

    The pieces that `push` and `finish` return, put together, are `text`; without a stop string that is what
    `tokenizer.decode` gives for all the tokens at once, however they were grouped.

    Special tokens have no text but for those `kept`. A stop string counts once it is completed by a token after the
    first `min_tokens`. `continues`: the tokens go on from a text, so a space that a vocabulary puts in front of every
    text is a space of the answer and stays.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        kept: frozenset[int] = frozenset(),
        include_stop: bool = False,
        min_tokens: int = 0,
        continues: bool = False,
    ) -> None:
        self._pieces = tokenizer.pieces
        self._skipped = tokenizer.special_token_ids - kept if skip_special_tokens else frozenset()
        self._strips_space = tokenizer.pieces.strips_space and not continues
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._scanner = StopScanner(stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._emitted: list[str] = []
        self.stop_hit: str | None = None
        self.num_tokens_used = 0

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._emitted)

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens and return the text that has become safe. After a stop string there is no more."""
        fresh = []
        for token_id in token_ids:
            if self.stop_hit is not None:
                break
            self.num_tokens_used += 1
            if token_id not in self._skipped and (characters := self._decode(token_id)):
                fresh.append(self._pass_stops(characters))
        return self._emit("".join(fresh))

    def finish(self) -> str:
        """The answer is complete: return what was held back. Bytes that never became a character are U+FFFD."""
        if self.stop_hit is not None:
            return ""
        fresh = self._pass_stops(self._utf8.decode(b"", final=True))
        if self._scanner is not None and self.stop_hit is None:
            fresh, self._scanner.held = fresh + self._scanner.held, ""
        return self._emit(fresh)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens that are all there."""
        return self.push(token_ids) + self.finish()

    def _decode(self, token_id: int) -> str:
        """The characters that this token completes. Ids past the vocabulary are a model's padding and have no text."""
        piece = self._pieces[token_id]
        if self._strips_space and piece:
            self._strips_space = False
            piece = piece.removeprefix(b" ")
        return self._utf8.decode(piece)

    def _pass_stops(self, characters: str) -> str:
        scanner = self._scanner
        if scanner is None:
            return characters
        window = scanner.held + characters
        found = scanner.scan(characters, counts=self.num_tokens_used > self._min_tokens)
        if found is None:
            return window[: len(window) - len(scanner.held)]
        self.stop_hit = found.stop
        return window[: found.end if self._include_stop else found.end - len(found.stop)]

    def _emit(self, fresh: str) -> str:
        if fresh:
            self._emitted.append(fresh)
        return fresh


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


class TokenOffsets:
    """Offsets of tokens that arrive one after another. `detokenizer` gives each token's share of the text."""

    def __init__(self, detokenizer: Detokenizer, start: int = 0) -> None:
        self._detokenizer = detokenizer
        self._end = start

    def take(self, token_ids: Sequence[int]) -> list[int]:
        offsets = []
        for token_id in token_ids:
            offsets.append(self._end)
            self._end += len(self._detokenizer.push([token_id]))
        return offsets


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt's text, and the offset in it of each of the prompt's tokens."""

    text: str
    offsets: list[int]


def locate_prompt(tokenizer: Tokenizer, text: str | None, token_ids: Sequence[int]) -> PromptText:
    """A prompt was given as a text, or as token ids alone, which are decoded.

    The encoder may change a text before it cuts it into tokens, so offsets in a given text are the encoder's own.
    """
    if text is not None:
        encoded, offsets = tokenizer.encode_with_offsets(text)
        if encoded == list(token_ids):
            return PromptText(text, offsets)
    offsets = TokenOffsets(Detokenizer(tokenizer)).take(token_ids)
    return PromptText(Detokenizer(tokenizer).decode(token_ids), offsets)
