"""Where tokens begin in the text that they make, in characters.

A token that holds only a part of a character begins where that character does. Completions report these offsets beside
log probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.text.detokenizer import Detokenizer
from quire.text.tokenizer import Tokenizer


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
