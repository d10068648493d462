"""What requests change about their logits before a token is chosen, for some rows of a step together.

In this order: tokens that the request's constraint does not allow and those outside `allowed_token_ids` are banned, the
bias is added, words in `bad_words` and, up to `min_tokens`, tokens that would end the answer are banned; then come the
repetition, frequency and presence penalties. What stays the same for a request is on the logits' device
(`LogitsProcessor`), and so is how often each token has occurred: a step costs the same at any length of context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.request import Request
from quire.kernels import Kernels
from quire.kernels.sampling import IN_PROMPT


class TokenCounts:
    """How often each token occurs in a request, a row each. Rows are made when they are first needed."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self.rows = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._free: list[int] = []

    def take(self, request: Request) -> int:
        """A row that has the request's prompt and none of its answer."""
        if not self._free:
            num_rows = len(self.rows)
            more = torch.zeros(max(1, num_rows), self._vocab_size, dtype=torch.int32, device=self._device)
            self.rows = torch.cat([self.rows, more])
            self._free = list(reversed(range(num_rows, len(self.rows))))
        row = self._free.pop()
        self.rows[row] = 0
        self.rows[row, to_device(sorted(set(request.prompt)), np.int64, self._device)] = IN_PROMPT
        return row

    def give_back(self, row: int) -> None:
        self._free.append(row)

    def add(self, rows: Tensor, tokens: Tensor) -> None:
        """Count tokens [n] once more in rows [n]; an entry may occur twice."""
        self.rows.view(-1).index_add_(0, rows * self._vocab_size + tokens, torch.ones_like(tokens, dtype=torch.int32))


class LogitsProcessor:
    """What a request changes about its logits, as far as that stays the same, and its row of counts."""

    def __init__(self, request: Request, counts: TokenCounts, device: torch.device) -> None:
        params, self._counts, self._device = request.params, counts, device
        allowed = params.allowed_token_ids
        self.allowed = None if allowed is None else to_device(allowed, np.int64, device)
        self.biased = to_device(list(params.logit_bias or ()), np.int64, device)
        self.bias = to_device(list((params.logit_bias or {}).values()), np.float32, device)
        self.penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self.row = counts.take(request) if params.has_penalties else None
        self.num_counted = request.num_prompt  # tokens of the request that its row has

    def count_known(self, request: Request) -> None:
        """Count the tokens that the host knows and the row does not have yet."""
        if self.row is None or self.num_counted >= len(request.tokens):
            return
        tokens = to_device(request.tokens[self.num_counted :], np.int64, self._device)
        self._counts.add(torch.full_like(tokens, self.row), tokens)
        self.num_counted = len(request.tokens)

    def release(self) -> None:
        if self.row is not None:
            self._counts.give_back(self.row)


class Position(NamedTuple):
    """One token to be chosen: whose it is and what stands before it."""

    request: Request
    processor: LogitsProcessor
    length: int  # tokens before it
    drafts: Sequence[int] = ()  # the last of these, if it follows drafts

    @property
    def output(self) -> Sequence[int]:
        """The answer before this position, as far as the host knows it."""
        return [*self.request.tokens[self.request.num_prompt :], *self.drafts]


def process_logits(logits: Tensor, positions: Sequence[Position], counts: TokenCounts, ops: Kernels) -> None:
    """Do to each row, in place, what its request asks for. logits [n, vocab] float32"""
    constrained = {row: each.request.constraint for row, each in enumerate(positions) if each.request.constraint}
    if constrained:
        masks = join_masks([constraint.allowed() for constraint in constrained.values()], logits.shape[1])
        rows = to_device(list(constrained), np.int64, logits.device)
        ops.apply_token_bitmask(logits, rows, to_device(masks, np.uint8, logits.device))
    for row, position in enumerate(positions):
        restrict(logits[row], position)
    penalized = {row: each for row, each in enumerate(positions) if each.processor.row is not None}
    if penalized:
        most = max(len(position.drafts) for position in penalized.values())
        index = [
            (row, position.processor.row, *position.drafts, *[-1] * (most - len(position.drafts)))
            for row, position in penalized.items()
        ]
        penalties = [position.processor.penalties for position in penalized.values()]
        ops.penalize(
            logits,
            counts.rows,
            to_device(index, np.int64, logits.device),
            to_device(penalties, np.float32, logits.device),
        )


def join_masks(masks: Sequence[bytes], vocab_size: int) -> NDArray[np.uint8]:
    """[masks, bytes]: those that are shorter than the vocabulary are filled up with zeros."""
    bits = np.zeros((len(masks), -(-vocab_size // 8)), np.uint8)
    for nth, mask in enumerate(masks):
        kept = np.frombuffer(mask, np.uint8)[: bits.shape[1]]
        bits[nth, : len(kept)] = kept
    return bits


def restrict(logits: Tensor, position: Position) -> None:
    """Ban other tokens and add the bias, in place. logits [vocab]"""
    request, processor = position.request, position.processor
    if processor.allowed is not None:
        kept = logits[processor.allowed]
        logits.fill_(-torch.inf)
        logits[processor.allowed] = kept
    if len(processor.biased):
        logits[processor.biased] += processor.bias
    banned = banned_words(request.bad_word_ids, position.output) if request.bad_word_ids else []
    if position.length - request.num_prompt < request.params.min_tokens:
        banned += request.stop_ids
    if banned:
        logits.index_fill_(0, to_device(banned, np.int64, logits.device), -torch.inf)


def banned_words(words: Sequence[Sequence[int]], output: Sequence[int]) -> list[int]:
    """The tokens that would complete one of the words."""
    return [
        word[-1] for word in words if len(word) == 1 or tuple(output[len(output) - len(word) + 1 :]) == tuple(word[:-1])
    ]


def to_device(numbers: Any, dtype: type[np.generic], device: torch.device) -> Tensor:
    """Numbers of the host on a device. They leave from memory of their own, so nobody has to wait for them."""
    here = torch.from_numpy(np.array(numbers, dtype))
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here
