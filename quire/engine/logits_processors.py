"""Logits processors: masks, bias and penalties of requests, applied to the logits of several samples at once.

In this order: the constraint's bitmask, `allowed_token_ids`, `logit_bias`, `bad_words`, the ban on stop tokens up to
`min_tokens`, then repetition, frequency and presence penalties. A request's fixed settings (`LogitsProcessor`) and its
token counts are on the device, so the cost of a step does not depend on the context's length.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.constraint import Constraint
from quire.core.request import Request
from quire.kernels import Kernels
from quire.kernels.arrays import Array, Arrays
from quire.kernels.sampling import IN_PROMPT

log = logging.getLogger("quire.engine")


class TokenCounts:
    """[rows, vocab]: how often each token occurs in a request. A request with penalties has a row."""

    def __init__(self, vocab_size: int, arrays: Arrays) -> None:
        self._vocab_size = vocab_size
        self._arrays = arrays
        self.rows = arrays.zeros((0, vocab_size), "int32")
        self._free: list[int] = []

    def allocate(self, request: Request) -> int:
        """Allocate a row and count the request's prompt in it."""
        if not self._free:
            num_rows, kept = len(self.rows), self.rows
            self.rows = self._arrays.zeros((max(1, 2 * num_rows), self._vocab_size), "int32")
            self._arrays.copy(self.rows[:num_rows], kept)
            self._free = list(reversed(range(num_rows, len(self.rows))))
        row = self._free.pop()
        self.rows[row] = 0
        self._arrays.fill(self.rows[row], self._arrays.put(sorted(set(request.prompt)), "int64"), IN_PROMPT)
        return row

    def free(self, row: int) -> None:
        self._free.append(row)


class LogitsProcessor:
    """A request's fixed settings on the device, and its row of `TokenCounts`."""

    def __init__(self, request: Request, counts: TokenCounts, arrays: Arrays) -> None:
        params, self._counts = request.params, counts
        allowed = params.allowed_token_ids
        self.allowed = None if allowed is None else arrays.put(allowed, "int64")
        self.biased = arrays.put(list(params.logit_bias or ()), "int64")
        self.bias = arrays.put(list((params.logit_bias or {}).values()), "float32")
        self.penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self.counts_row = counts.allocate(request) if params.has_penalties else None
        self.num_counted = request.num_prompt  # tokens of the request that are counted in its row

    def count_known(self, request: Request, ops: Kernels) -> None:
        """Count the tokens that have reached the host and are not counted yet."""
        if self.counts_row is None or self.num_counted >= len(request.tokens):
            return
        new = request.tokens[self.num_counted :]
        rows = ops.arrays.put([self.counts_row] * len(new), "int64")
        ops.count_tokens(self._counts.rows, rows, ops.arrays.put(new, "int64"))
        self.num_counted = len(request.tokens)

    def release(self) -> None:
        if self.counts_row is not None:
            self._counts.free(self.counts_row)


class SampleContext(NamedTuple):
    """The request of one sample, and the tokens before it."""

    request: Request
    processor: LogitsProcessor
    length: int  # number of tokens before it
    drafts: Sequence[int] = ()  # the drafts among them, which are the last

    def last_output(self, count: int) -> Sequence[int]:
        """The last `count` output tokens before this sample that are on the host, or as many as there are."""
        first = max(self.request.num_prompt, len(self.request.tokens) - count)
        return [*self.request.tokens[first:], *self.drafts]


def process_logits(logits: Array, contexts: Sequence[SampleContext], counts: TokenCounts, ops: Kernels) -> None:
    """Apply each context's processors to its row, in place. logits [n, vocab] float32"""
    constrained = {row: each for row, each in enumerate(contexts) if each.request.constraint is not None}
    if constrained:
        masks = join_masks(find_masks(list(constrained.values())), logits.shape[1])
        ops.apply_token_bitmask(logits, ops.arrays.put(list(constrained), "int64"), ops.arrays.put(masks, "uint8"))
    for row, context in enumerate(contexts):
        apply_bans_and_bias(logits[row], context, ops.arrays)
    penalized = {row: each for row, each in enumerate(contexts) if each.processor.counts_row is not None}
    if penalized:
        max_drafts = max(len(context.drafts) for context in penalized.values())
        index = [
            (row, context.processor.counts_row, *context.drafts, *[-1] * (max_drafts - len(context.drafts)))
            for row, context in penalized.items()
        ]
        penalties = [context.processor.penalties for context in penalized.values()]
        ops.penalize(logits, counts.rows, ops.arrays.put(index, "int64"), ops.arrays.put(penalties, "float32"))


def find_masks(contexts: Sequence[SampleContext]) -> list[bytes]:
    """The mask of each context's constraint, advanced by its drafts. Contexts of a row come parents first.

    If a constraint raises, no token is allowed. So its request ends, and the others go on.
    """
    states: dict[tuple[Request, tuple[int, ...]], Constraint] = {}
    masks: list[bytes] = []
    for context in contexts:
        request, path = context.request, tuple(context.drafts)
        try:
            state = request.constraint
            assert state is not None
            if path:
                state = states.get((request, path[:-1]), state).copy()
                state.advance(path[-1])
                states[request, path] = state
            masks.append(state.allowed())
        except Exception:
            log.exception("a constraint failed")
            masks.append(b"")
    return masks


def join_masks(masks: Sequence[bytes], vocab_size: int) -> NDArray[np.uint8]:
    """[masks, bytes]. Masks shorter than the vocabulary are padded with zeros."""
    bits = np.zeros((len(masks), -(-vocab_size // 8)), np.uint8)
    for nth, mask in enumerate(masks):
        kept = np.frombuffer(mask, np.uint8)[: bits.shape[1]]
        bits[nth, : len(kept)] = kept
    return bits


def apply_bans_and_bias(logits: Array, context: SampleContext, arrays: Arrays) -> None:
    """In place. logits [vocab]"""
    request, processor = context.request, context.processor
    if processor.allowed is not None:
        kept = logits[processor.allowed]
        logits[:] = -math.inf
        logits[processor.allowed] = kept
    if len(processor.biased):
        logits[processor.biased] += processor.bias
    banned: list[int] = []
    if words := request.bad_word_ids:
        banned = banned_words(words, context.last_output(max(map(len, words)) - 1))
    if context.length - request.num_prompt < request.params.min_tokens:
        banned += request.stop_ids
    if banned:
        arrays.fill(logits, arrays.put(banned, "int64"), -math.inf)


def banned_words(words: Sequence[Sequence[int]], output: Sequence[int]) -> list[int]:
    """The tokens that complete one of the words."""
    return [
        word[-1] for word in words if len(word) == 1 or tuple(output[len(output) - len(word) + 1 :]) == tuple(word[:-1])
    ]
