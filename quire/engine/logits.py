"""What requests change about their logits before a token is chosen, for some rows of a step together.

In this order: tokens that the request's constraint does not allow and those outside `allowed_token_ids` are banned, the
bias is added, words in `bad_words` and, up to `min_tokens`, tokens that would end the answer are banned; then come the
repetition, frequency and presence penalties. What stays the same for a request is on the logits' device
(`LogitChanges`), and so is how often each token has occurred: a step costs the same at any length of context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.core.request import Request

# For each byte of a mask what its eight tokens get added: a branch a token would take ten times as long.
BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
BITS_TO_ADDENDS = np.where(BITS, 0.0, -np.inf).astype(np.float32)
IN_PROMPT = 1 << 30  # is added to the count of a token that occurs in the prompt


class TokenCounts:
    """How often each token occurs in a request, a row each. Rows are made when they are first needed."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._rows = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._free: list[int] = []

    def take(self, request: Request) -> int:
        """A row that has the request's prompt and none of its answer."""
        if not self._free:
            num_rows = len(self._rows)
            more = torch.zeros(max(1, num_rows), self._vocab_size, dtype=torch.int32, device=self._device)
            self._rows = torch.cat([self._rows, more])
            self._free = list(reversed(range(num_rows, len(self._rows))))
        row = self._free.pop()
        self._rows[row] = 0
        self._rows[row, send(sorted(set(request.prompt)), np.int64, self._device)] = IN_PROMPT
        return row

    def give_back(self, row: int) -> None:
        self._free.append(row)

    def add(self, rows: Tensor, tokens: Tensor) -> None:
        """Count tokens [n] once more in rows [n]; an entry may occur twice."""
        self._rows.view(-1).index_add_(0, rows * self._vocab_size + tokens, torch.ones_like(tokens, dtype=torch.int32))

    def read(self, rows: Tensor) -> Tensor:
        """A copy of some rows, [n, vocab] int32."""
        return self._rows[rows]


class LogitChanges:
    """What a request changes about its logits, as far as that stays the same, and its row of counts."""

    def __init__(self, request: Request, counts: TokenCounts, device: torch.device) -> None:
        params, self._counts, self._device = request.params, counts, device
        self.allowed = None if params.allowed_token_ids is None else send(params.allowed_token_ids, np.int64, device)
        self.biased = send(list(params.logit_bias or ()), np.int64, device)
        self.bias = send(list((params.logit_bias or {}).values()), np.float32, device)
        self.penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self.row = counts.take(request) if params.has_penalties else None
        self.num_counted = request.num_prompt  # tokens of the request that its row has

    def count_known(self, request: Request) -> None:
        """Count the tokens that the host knows and the row does not have yet."""
        if self.row is None or self.num_counted >= len(request.tokens):
            return
        tokens = send(request.tokens[self.num_counted :], np.int64, self._device)
        self._counts.add(torch.full_like(tokens, self.row), tokens)
        self.num_counted = len(request.tokens)

    def release(self) -> None:
        if self.row is not None:
            self._counts.give_back(self.row)


class Position(NamedTuple):
    """One token to be chosen: whose it is and what stands before it."""

    request: Request
    changes: LogitChanges
    length: int  # tokens before it
    drafts: Sequence[int] = ()  # the last of these, if it follows drafts

    @property
    def output(self) -> Sequence[int]:
        """The answer before this position, as far as the host knows it."""
        return [*self.request.tokens[self.request.num_prompt :], *self.drafts]


def change(logits: Tensor, positions: Sequence[Position], counts: TokenCounts) -> None:
    """Do to each row, in place, what its request asks for. logits [n, vocab] float32"""
    masks = [
        (row, position.request.constraint.allowed())
        for row, position in enumerate(positions)
        if position.request.constraint is not None
    ]
    if masks and logits.is_cuda:
        forbid_at_once(logits, masks)
    else:
        for row, mask in masks:
            forbid_others(logits[row], mask)
    for row, position in enumerate(positions):
        restrict(logits[row], position)
    penalize(logits, positions, counts)


def forbid_others(logits: Tensor, allowed: bytes) -> None:
    """Ban what has no bit set, and what lies behind the last bit, in place. logits [vocab], on the CPU"""
    addends = BITS_TO_ADDENDS.take(np.frombuffer(allowed, np.uint8), axis=0).reshape(-1)[: len(logits)]
    logits[: len(addends)] += torch.from_numpy(addends)
    logits[len(addends) :] = -torch.inf


def forbid_at_once(logits: Tensor, masks: Sequence[tuple[int, bytes]]) -> None:
    """The same for (row, mask) of many rows: the bits are sent, and what they mean is found there."""
    size = logits.shape[1]
    bits = np.zeros((len(masks), -(-size // 8)), np.uint8)
    for nth, (_, mask) in enumerate(masks):
        kept = np.frombuffer(mask, np.uint8)[: bits.shape[1]]
        bits[nth, : len(kept)] = kept
    rows = send([row for row, _ in masks], np.int64, logits.device)
    places = torch.arange(8, dtype=torch.uint8, device=logits.device)
    is_banned = ((send(bits, np.uint8, logits.device)[:, :, None] >> places) & 1).flatten(1)[:, :size] == 0
    logits[rows] = logits[rows].masked_fill(is_banned, -torch.inf)


def restrict(logits: Tensor, position: Position) -> None:
    """Ban other tokens and add the bias, in place. logits [vocab]"""
    request, changes = position.request, position.changes
    if changes.allowed is not None:
        kept = logits[changes.allowed]
        logits.fill_(-torch.inf)
        logits[changes.allowed] = kept
    if len(changes.biased):
        logits[changes.biased] += changes.bias
    banned = banned_words(request.bad_word_ids, position.output) if request.bad_word_ids else []
    if position.length - request.num_prompt < request.params.min_tokens:
        banned += request.stop_ids
    if banned:
        logits.index_fill_(0, send(banned, np.int64, logits.device), -torch.inf)


def banned_words(words: Sequence[Sequence[int]], output: Sequence[int]) -> list[int]:
    """The tokens that would complete one of the words."""
    return [
        word[-1] for word in words if len(word) == 1 or tuple(output[len(output) - len(word) + 1 :]) == tuple(word[:-1])
    ]


def penalize(logits: Tensor, positions: Sequence[Position], counts: TokenCounts) -> None:
    """Make what was said before less likely, in place. logits [n, vocab]"""
    penalized = [row for row, position in enumerate(positions) if position.changes.row is not None]
    if not penalized:
        return
    device, its = logits.device, [positions[row] for row in penalized]
    occurred = counts.read(send([position.changes.row for position in its], np.int64, device))
    drafts = [(nth, token) for nth, position in enumerate(its) for token in position.drafts]
    if drafts:
        index, tokens = send(drafts, np.int64, device).unbind(1)
        occurred.view(-1).index_add_(0, index * logits.shape[1] + tokens, torch.ones_like(tokens, dtype=torch.int32))
    numbers = send([position.changes.penalties for position in its], np.float32, device)
    repetition, frequency, presence = (numbers[:, column, None] for column in range(3))
    rows = send(penalized, np.int64, device)
    values = logits[rows]
    values = torch.where(occurred > 0, torch.where(values > 0, values / repetition, values * repetition), values)
    in_answer = occurred & (IN_PROMPT - 1)
    values -= frequency * in_answer + presence * (in_answer > 0)
    logits[rows] = values


def send(numbers: Any, dtype: type[np.generic], device: torch.device) -> Tensor:
    """Numbers of the host on a device. They leave from memory of their own, so nobody has to wait for them."""
    here = torch.from_numpy(np.array(numbers, dtype))
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here
