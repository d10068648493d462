"""Tokens to text while they arrive.

A `Detokenizer` belongs to one answer. It gives out text as soon as nothing that comes later can change it: half a
UTF-8 character waits for its other half, and whatever may grow into a stop string waits until it has or cannot. The
work for a token does not depend on how long the answer already is.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Sequence

from quire.core.params import SamplingParams
from quire.text.stops import StopScanner
from quire.text.tokenizer import Tokenizer


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

    def copy(self) -> Detokenizer:
        """One that has taken the same tokens."""
        twin = copy.copy(self)
        twin._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        twin._utf8.setstate(self._utf8.getstate())
        twin._scanner = copy.copy(self._scanner)
        twin._emitted = list(self._emitted)
        return twin

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


class TextStops:
    """Whether an answer has come to a stop string: the StopMatcher of a beam."""

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
