"""What requests change about their logits before a token is chosen, for all rows of a step together.

In this order: tokens that the request's constraint does not allow and those outside `allowed_token_ids` are banned, the
bias is added, words in `bad_words` and, up to `min_tokens`, tokens that would end the answer are banned; then come the
repetition, frequency and presence penalties. The host knows the tokens, so it says where and by how much; that goes to
the logits' device at once for all rows, and without waiting for what is computed there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.request import Request

# For each byte of a mask what its eight tokens get added: a branch a token would take ten times as long.
BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
BITS_TO_ADDENDS = np.where(BITS, 0.0, -np.inf).astype(np.float32)


class Position(NamedTuple):
    """One token to be chosen: whose it is and what stands before it."""

    request: Request
    tokens: Sequence[int]  # prompt, answer so far and drafts before this position, as far as the host knows them
    place: int  # how many there are

    @property
    def output(self) -> Sequence[int]:
        return self.tokens[self.request.num_prompt :]


def change(logits: Tensor, positions: Sequence[Position]) -> None:
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
    penalize(logits, positions)


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
    request, params = position.request, position.request.params
    if params.allowed_token_ids is not None:
        allowed = send(params.allowed_token_ids, np.int64, logits.device)
        kept = logits[allowed]
        logits.fill_(-torch.inf)
        logits[allowed] = kept
    if params.logit_bias:
        index = send(list(params.logit_bias), np.int64, logits.device)
        logits[index] += send(list(params.logit_bias.values()), np.float32, logits.device)
    banned = banned_words(request.bad_word_ids, position.output) if request.bad_word_ids else []
    if len(position.tokens) - request.num_prompt < params.min_tokens:
        banned += request.stop_ids
    if banned:
        logits.index_fill_(0, send(banned, np.int64, logits.device), -torch.inf)


def banned_words(words: Sequence[Sequence[int]], output: Sequence[int]) -> list[int]:
    """The tokens that would complete one of the words."""
    return [
        word[-1] for word in words if len(word) == 1 or tuple(output[len(output) - len(word) + 1 :]) == tuple(word[:-1])
    ]


def penalize(logits: Tensor, positions: Sequence[Position]) -> None:
    """Make what was said before less likely, in place. logits [n, vocab]"""
    seen, counted = Spots(), Spots()
    for row, position in enumerate(positions):
        params = position.request.params
        if params.repetition_penalty != 1.0:
            seen.add(row, set(position.tokens), np.float32(params.repetition_penalty))
        if params.frequency_penalty or params.presence_penalty:
            counts = Counter(position.output)
            times = np.fromiter(counts.values(), np.float32, len(counts))
            counted.add(row, counts, np.float32(params.frequency_penalty) * times + np.float32(params.presence_penalty))
    if seen:
        rows, tokens, factors = seen.send(logits.device)
        values = logits[rows, tokens]
        logits[rows, tokens] = torch.where(values > 0, values / factors, values * factors)
    if counted:
        rows, tokens, addends = counted.send(logits.device)
        logits[rows, tokens] -= addends


class Spots:
    """Tokens of some rows, and a number for each, gathered on the host."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._tokens: list[NDArray[np.int64]] = []
        self._numbers: list[NDArray[np.float32]] = []

    def __bool__(self) -> bool:
        return any(map(len, self._tokens))

    def add(self, row: int, tokens: Iterable[int], numbers: NDArray[np.float32] | np.float32) -> None:
        """No token twice; one number each, or one for all of them."""
        places = np.array([*tokens], np.int64)
        self._rows.append(row)
        self._tokens.append(places)
        self._numbers.append(np.broadcast_to(numbers, places.shape))

    def send(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, tokens and numbers, all of one length."""
        rows = np.repeat(self._rows, [len(tokens) for tokens in self._tokens])
        tokens, numbers = np.concatenate(self._tokens), np.concatenate(self._numbers)
        return send(rows, np.int64, device), send(tokens, np.int64, device), send(numbers, np.float32, device)


def send(numbers: Any, dtype: type[np.generic], device: torch.device) -> Tensor:
    """Numbers of the host on a device. They leave from memory of their own, so nobody has to wait for them."""
    here = torch.from_numpy(np.array(numbers, dtype))
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here
