"""An answer's text, cut into a piece for each of its tokens: what TGI's tokens have as their text.

A token's piece is the characters that it completes. A token that holds half of a character has the empty text, and the
one with the other half has all of it. Special tokens, which are left out of the answer, have the empty text too, so
that the pieces put together are the answer, always. What the detokenizer holds back (it may become a stop string) is
held back here.
"""

from __future__ import annotations

import codecs

from quire.core.outputs import CompletionOutput
from quire.text.tokenizers.tokenizer import Tokenizer


class TokenTexts:
    """The pieces of one answer, in order, each given out once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._ends: list[int] = []  # how many characters a token and those before it have completed
        self.num_given = 0

    def take(self, answer: CompletionOutput) -> list[str]:
        """The pieces of tokens that have not been given out and whose text is settled.

        The last token has what is left: bytes that never became a character, or its part up to the stop string's end.
        """
        self._measure(answer)
        num_settled, length = len(answer.token_ids), len(answer.text)
        if not answer.finished:
            while num_settled > self.num_given and self._ends[num_settled - 1] > length:
                num_settled -= 1
        given = range(self.num_given, num_settled)
        self.num_given = num_settled
        last = len(answer.token_ids) - 1 if answer.finished else None
        return [answer.text[self._end(i - 1) : length if i == last else self._end(i)] for i in given]

    def _end(self, index: int) -> int:
        return self._ends[index] if index >= 0 else 0

    def _measure(self, answer: CompletionOutput) -> None:
        length = self._end(len(self._ends) - 1)
        for token in answer.token_ids[len(self._ends) :]:
            if token not in self._tokenizer.special_token_ids:
                length += len(self._utf8.decode(self._tokenizer.pieces[token]))
            self._ends.append(length)
