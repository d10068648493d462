"""Detokenizer: tokens to text while they arrive, and the search for stop strings in that text.

A `Detokenizer` belongs to one answer. It returns text as soon as later tokens cannot change it: an incomplete UTF-8
character is held back until it is complete, and text that may be the beginning of a stop string is held back until it
is one or cannot become one. The cost of a token does not depend on the length of the answer. `TokenOffsets` and
`locate_prompt` compute where each token begins in the text, for completions with log probabilities.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.core.params import SamplingParams
from quire.errors import InvalidParams
from quire.text.tokenizers.tokenizer import Tokenizer

TextEnd = Callable[[str], bool]


class Detokenizer:
    """Decodes tokens into text that no later token can change.

    The strings that `push` and `finish` return, concatenated, are `text`. Without a stop string that equals
    `tokenizer.decode` of all tokens, however the tokens are grouped into calls.

    skip_special_tokens   special tokens produce no text, except those in `keep_special_ids`
    include_stop          the stop string is included in the text
    min_tokens            a stop string that is completed within this many tokens is ignored
    continues             the tokens continue an existing text, so a leading space belongs to the answer and is kept
    text_end              gets the text of each token, and says whether the answer ends with it
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        keep_special_ids: frozenset[int] = frozenset(),
        include_stop: bool = False,
        min_tokens: int = 0,
        continues: bool = False,
        text_end: TextEnd | None = None,
    ) -> None:
        self._pieces = tokenizer.pieces
        self._skipped = tokenizer.special_token_ids - keep_special_ids if skip_special_tokens else frozenset()
        self._strip_leading_space = tokenizer.pieces.strip_leading_space and not continues
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._scanner = StopStringScanner(stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._emitted: list[str] = []
        self._text_end = text_end
        self.stop_hit: str | None = None
        self.has_ended = False  # by a stop string or by `text_end`
        self.num_tokens_used = 0

    @property
    def text(self) -> str:
        """All text returned so far."""
        return "".join(self._emitted)

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens. Returns the text that has become final; nothing after the token that ends the answer."""
        fresh = []
        for token_id in token_ids:
            if self.has_ended:
                break
            self.num_tokens_used += 1
            if token_id not in self._skipped and (characters := self._decode(token_id)):
                fresh.append(self._pass_stops(characters))
                if self._text_end is not None and self._text_end(fresh[-1]):
                    self.has_ended = True
        return self._emit("".join(fresh))

    def finish(self) -> str:
        """End the answer. Returns the text that was held back; an incomplete UTF-8 character becomes U+FFFD."""
        if self.has_ended:
            return ""
        fresh = self._pass_stops(self._utf8.decode(b"", final=True))
        if self._scanner is not None and self.stop_hit is None:
            fresh, self._scanner.held = fresh + self._scanner.held, ""
        return self._emit(fresh)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a complete sequence of tokens."""
        return self.push(token_ids) + self.finish()

    def copy(self) -> Detokenizer:
        """A detokenizer that has decoded the same tokens."""
        twin = copy.copy(self)
        twin._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        twin._utf8.setstate(self._utf8.getstate())
        twin._scanner = copy.copy(self._scanner)
        twin._emitted = list(self._emitted)
        return twin

    def _decode(self, token_id: int) -> str:
        """The characters that this token completes. Ids beyond the vocabulary are padding and have no text."""
        piece = self._pieces[token_id]
        if self._strip_leading_space and piece:
            self._strip_leading_space = False
            piece = piece.removeprefix(b" ")
        return self._utf8.decode(piece)

    def _pass_stops(self, characters: str) -> str:
        scanner = self._scanner
        if scanner is None:
            return characters
        window = scanner.held + characters
        found = scanner.scan(characters, may_stop=self.num_tokens_used > self._min_tokens)
        if found is None:
            return window[: len(window) - len(scanner.held)]
        self.stop_hit, self.has_ended = found.stop, True
        return window[: found.end if self._include_stop else found.end - len(found.stop)]

    def _emit(self, fresh: str) -> str:
        if fresh:
            self._emitted.append(fresh)
        return fresh


class StopMatch(NamedTuple):
    """A stop string that was found."""

    stop: str
    end: int  # index behind it, in the held characters followed by the scanned ones


class StopStringScanner:
    """Searches text that arrives in pieces for stop strings.

    Finds the stop string that ends first; if several end at the same character, the longest. Characters at the end of
    the text that may begin a stop string are held. The next search needs nothing else of the earlier text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise InvalidParams(f"A stop string is empty or not text in {list(stops)!r}; give non-empty strings.")
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._first_characters = frozenset(stop[0] for stop in stops)
        self.held = ""  # the longest suffix of the text that is a proper prefix of a stop string

    def scan(self, characters: str, may_stop: bool) -> StopMatch | None:
        """Scan the next characters. Without `may_stop`, a stop string that is completed here is ignored."""
        if not self.held and self._first_characters.isdisjoint(characters):
            return None
        window = self.held + characters
        if may_stop and (found := self._find(window, len(self.held))) is not None:
            return found
        self.held = self._find_held(window)
        return None

    def _find(self, window: str, num_held: int) -> StopMatch | None:
        """The first stop string that ends in the new characters. One that ends earlier was ignored before."""
        found: StopMatch | None = None
        for stop in self._stops:
            start = window.find(stop, max(0, num_held + 1 - len(stop)))
            if start >= 0 and (found is None or start + len(stop) < found.end):
                found = StopMatch(stop, start + len(stop))
        return found

    def _find_held(self, window: str) -> str:
        """The longest suffix of the window that is a proper prefix of a stop string."""
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
    """The character offset at which each token begins (`text_offset`), for tokens that arrive one after another.

    A token that holds only some bytes of a character begins where that character does.
    """

    def __init__(self, detokenizer: Detokenizer, start: int = 0) -> None:
        self._detokenizer = detokenizer
        self._end = start

    def push(self, token_ids: Sequence[int]) -> list[int]:
        offsets = []
        for token_id in token_ids:
            offsets.append(self._end)
            self._end += len(self._detokenizer.push([token_id]))
        return offsets


class PromptText(NamedTuple):
    """A prompt's text and the character offset of each of its tokens."""

    text: str
    offsets: list[int]


def locate_prompt(tokenizer: Tokenizer, text: str | None, token_ids: Sequence[int]) -> PromptText:
    """The offsets of a prompt's tokens. A prompt that was given as token ids only is decoded.

    The tokenizer may normalize a text before it splits it, so the offsets in a given text are those of the tokenizer.
    """
    if text is not None:
        encoded, offsets = tokenizer.encode_with_offsets(text)
        if encoded == list(token_ids):
            return PromptText(text, offsets)
    offsets = TokenOffsets(Detokenizer(tokenizer)).push(token_ids)
    return PromptText(Detokenizer(tokenizer).decode(token_ids), offsets)


class TextStops:
    """Whether a beam has reached a stop string. This is a beam's StopMatcher."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer

    @classmethod
    def of(cls, params: SamplingParams, tokenizer: Tokenizer) -> TextStops | None:
        """For beams with these parameters; None if they have no stop strings."""
        if not params.use_beam_search or not params.stop_strings:
            return None
        return cls(
            Detokenizer(
                tokenizer,
                stop=params.stop_strings,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
                continues=True,
            )
        )

    def advance(self, token: int) -> bool:
        self._detokenizer.push([token])
        return self._detokenizer.stop_hit is not None

    def copy(self) -> TextStops:
        return TextStops(self._detokenizer.copy())
