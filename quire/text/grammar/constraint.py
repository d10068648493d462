"""Grammars: constraints for the answers of one model, out of llguidance's matchers.

`Intake` asks for them offline, the engine's process for the server's requests. Compiling is bounded by size here; what
comes from strangers is tried out in a process of its own first (`grammar_worker.py`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from quire.core.structured import StructuredOutputs
from quire.errors import BadGrammar
from quire.text.grammar.compiler import Compiler, Vocabulary, in_one_line

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from quire.text.tokenizers.tokenizer import Tokenizer

NUM_KEPT = 16  # compiled grammars: the same schema often comes again


class GrammarConstraint:
    """How far an answer has come in its grammar.

    Where the grammar leaves no choice of text, the tokens that spell it are worked out once for the whole stretch.
    """

    def __init__(self, matcher: LLMatcher, num_tokens: int) -> None:
        self._matcher = matcher
        self._num_bytes = (num_tokens + 7) // 8
        self._forced: deque[int] = deque()
        self._has_looked = False
        self.error = ""

    def allowed(self) -> bytes:
        """A bit for each token; end tokens are among them exactly where the grammar may end. None after an error."""
        self._look_ahead()
        if self._forced:
            return self._only(self._forced[0])
        mask = self._matcher.compute_bitmask()
        return b"" if self._has_failed() else mask

    def advance(self, token: int) -> None:
        self._look_ahead()
        if self._forced:
            self._forced.popleft()
        self._has_looked = bool(self._forced)
        self._matcher.consume_token(token)
        self._has_failed()

    def _look_ahead(self) -> None:
        """Done at every position whether or not it is sampled, so that a replayed answer is spelled as it was."""
        if not self._has_looked and not self._matcher.is_stopped():
            self._forced.extend(self._matcher.compute_ff_tokens())
        self._has_looked = True

    def _has_failed(self) -> bool:
        if self._matcher.is_error():
            self._forced.clear()
            reason = in_one_line(self._matcher.get_error())
            self.error = f"The schema or grammar could not be followed any further: {reason}; simplify it."
        return bool(self.error)

    def _only(self, token: int) -> bytes:
        mask = bytearray(self._num_bytes)
        mask[token >> 3] = 1 << (token & 7)
        return bytes(mask)


class Grammars:
    """Makes constraints. llguidance is loaded, and the vocabulary read, when the first one is asked for."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = end_token_ids
        self._compiler: Compiler | None = None
        self._kept: OrderedDict[StructuredOutputs, LLMatcher] = OrderedDict()

    def constraint(self, spec: StructuredOutputs, output: Sequence[int] = ()) -> GrammarConstraint:
        """A constraint at the beginning of an answer, or behind the tokens that it already has."""
        num_tokens = min(self._tokenizer.vocab_size, self._vocab_size)
        constraint = GrammarConstraint(self._matcher(spec).deep_copy(), num_tokens)
        for token in output:
            constraint.advance(token)
        if constraint.error:
            raise BadGrammar(f"The {len(output)} tokens of the answer so far do not fit. {constraint.error}")
        return constraint

    def _matcher(self, spec: StructuredOutputs) -> LLMatcher:
        if self._compiler is None:
            vocabulary = Vocabulary.of(self._tokenizer, self._vocab_size, self._end_token_ids)
            self._compiler = Compiler(vocabulary, partial(self._tokenizer.encode, add_special_tokens=False))
        matcher = self._kept.pop(spec, None) or self._compiler.compile(spec)
        self._kept[spec] = matcher
        if len(self._kept) > NUM_KEPT:
            self._kept.popitem(last=False)
        return matcher
