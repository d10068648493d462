"""Structured outputs: GrammarConstraint masks the tokens of one answer, GrammarBackend makes constraints for a model.

Both use llguidance. Offline, `InputProcessor` makes the constraints; in a server, the engine's process does. The size
of a grammar is limited in `compiler.py`. A server also checks each grammar in a separate process (`checker.py`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from quire.core.structured import StructuredOutputs
from quire.errors import BadGrammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from quire.text.grammar.compiler import GrammarCompiler
    from quire.text.tokenizers.tokenizer import Tokenizer

MAX_CACHED = 16  # compiled grammars; clients often send the same schema again


class GrammarConstraint:
    """The state of one answer in its grammar.

    Where the grammar allows only one text, its tokens are computed once for the whole text (fast-forward tokens).
    """

    def __init__(self, matcher: LLMatcher, num_tokens: int) -> None:
        self._matcher = matcher
        self._num_tokens = num_tokens
        self._num_bytes = (num_tokens + 7) // 8
        self._forced: deque[int] = deque()
        self._has_looked = False
        self.error = ""

    def allowed(self) -> bytes:
        """A bitmask of the next tokens. End tokens are allowed where the grammar may end. Empty after an error."""
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

    def forced(self) -> Sequence[int]:
        self._look_ahead()
        return self._forced

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """Forced tokens are compared first: of several spellings of a text only one is allowed.

        An id that the tokenizer lacks would put the matcher into its error state.
        """
        self._look_ahead()
        unknown = next((index for index, token in enumerate(tokens) if token >= self._num_tokens), len(tokens))
        tokens = tokens[:unknown]
        for index, (token, forced) in enumerate(zip(tokens, self._forced, strict=False)):
            if token != forced:
                return index
        return 0 if self.error else int(self._matcher.validate_tokens(list(tokens)))

    def copy(self) -> GrammarConstraint:
        twin = GrammarConstraint(self._matcher.deep_copy(), self._num_tokens)
        twin._forced, twin._has_looked, twin.error = self._forced.copy(), self._has_looked, self.error
        return twin

    def _look_ahead(self) -> None:
        """Compute forced tokens at every position, sampled or not, so that a replayed answer has the same tokens."""
        if not self._has_looked and not self._matcher.is_stopped():
            self._forced.extend(self._matcher.compute_ff_tokens())
        self._has_looked = True

    def _has_failed(self) -> bool:
        if self._matcher.is_error():
            from quire.text.grammar.compiler import shorten_reason

            self._forced.clear()
            reason = shorten_reason(self._matcher.get_error())
            self.error = f"The schema or grammar could not be followed any further: {reason}; simplify it."
        return bool(self.error)

    def _only(self, token: int) -> bytes:
        mask = bytearray(self._num_bytes)
        mask[token >> 3] = 1 << (token & 7)
        return bytes(mask)


class GrammarBackend:
    """Compiles grammars and makes constraints. The first one loads llguidance and reads the vocabulary."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = end_token_ids
        self._compiler: GrammarCompiler | None = None
        self._cache: OrderedDict[StructuredOutputs, LLMatcher] = OrderedDict()

    def make_constraint(self, spec: StructuredOutputs, output: Sequence[int] = ()) -> GrammarConstraint:
        """A constraint at the start of an answer, advanced by the tokens that the answer already has."""
        num_tokens = min(self._tokenizer.vocab_size, self._vocab_size)
        constraint = GrammarConstraint(self._matcher(spec).deep_copy(), num_tokens)
        for token in output:
            constraint.advance(token)
        if constraint.error:
            raise BadGrammar(f"The {len(output)} tokens of the answer so far do not fit. {constraint.error}")
        return constraint

    def _matcher(self, spec: StructuredOutputs) -> LLMatcher:
        if self._compiler is None:
            from quire.text.grammar.compiler import GrammarCompiler, TokenizerInfo

            tokenizer_info = TokenizerInfo.of(self._tokenizer, self._vocab_size, self._end_token_ids)
            self._compiler = GrammarCompiler(tokenizer_info, partial(self._tokenizer.encode, add_special_tokens=False))
        matcher = self._cache.pop(spec, None) or self._compiler.compile(spec)
        self._cache[spec] = matcher
        if len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)
        return matcher
