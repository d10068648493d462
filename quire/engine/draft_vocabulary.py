"""The output matrices of draft heads: a trimmed vocabulary with each request's own tokens, or whole matrices.

A trimmed vocabulary has the rows of the target's head for the ids that are drafted most. Rare words of a prompt tend to
occur in its answer, so a second small matrix holds the rows of the request's own tokens. It grows with the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.core.request import Request
from quire.kernels import Kernels
from quire.kernels.cpu.native import Native
from quire.kernels.cpu.tape import address
from quire.kernels.cpu.tape_memory import padded
from quire.layers.embedding import Head
from quire.quant.panels import PANEL_BLOCK, ROWS_IN_PANEL, PanelWeight

MAX_OWN = 1024  # own tokens of a request; further ones are not drafted
OWN_SIZES = (64, 64, 128, 256, 512)  # rows of the matrices that hold them, MAX_OWN in all
GATHER_ROWS = 4096  # that are in float32 at the same time

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


class DraftOutput(Protocol):
    """From the states of a head to logits."""

    def logits(self, states: Floats, requests: Sequence[Request]) -> Floats:
        """states [requests, depth, hidden_size] -> [requests * depth, width]. The next call overwrites them."""
        ...

    def token_ids(self, request: Request, columns: Ids) -> Ids:
        """The token ids of columns of the logits."""
        ...

    def finish(self, request_id: str) -> None: ...

    def reset(self) -> None: ...


class TrimmedVocabulary:
    """Rows `ids` of the target's head, and those of each request's own tokens."""

    def __init__(self, ids: Ids, head: Head, native: Native, max_rows: int, max_requests: int) -> None:
        self.ids = ids
        self._head = head
        self._native = native
        self._weight = PanelWeight([gather(head, ids, native)], native)
        self._drafted = np.zeros(head.weight.shape[0], np.bool_)
        self._drafted[ids] = True
        self._own: dict[str, OwnTokens] = {}
        self._max_requests = max_requests
        self._buffer = np.empty((max_rows, padded(len(ids) + MAX_OWN)), np.float32)

    def logits(self, states: Floats, requests: Sequence[Request]) -> Floats:
        own = [self._own_tokens(request) for request in requests]
        num_requests, depth, size = states.shape
        num_ids, num_own = len(self.ids), max(len(each) for each in own)
        logits = self._buffer[: num_requests * depth, : num_ids + num_own]
        self._weight.multiply(states.reshape(-1, size), logits[:, :num_ids])
        for nth, each in enumerate(own):
            each.multiply(states[nth], logits[nth * depth : (nth + 1) * depth, num_ids:])
        logits = cap(self._head, logits)
        for nth, each in enumerate(own):
            logits[nth * depth : (nth + 1) * depth, num_ids + len(each) :] = -np.inf
        return logits

    def token_ids(self, request: Request, columns: Ids) -> Ids:
        last = len(self.ids) - 1
        own = self._own[request.id].ids[np.maximum(columns - last - 1, 0)]
        return np.where(columns <= last, self.ids[np.minimum(columns, last)], own)

    def spread(self, logits: Floats, requests: Sequence[Request], out: Floats) -> None:
        """Write logits of one place, [requests, width], to the columns of their token ids. What cannot be drafted is
        minus infinity. out [requests, vocab]"""
        num_ids = len(self.ids)
        out[...] = -np.inf
        out[:, self.ids] = logits[:, :num_ids]
        for row, request in enumerate(requests):
            own = self._own[request.id]
            out[row, own.ids[: len(own)]] = logits[row, num_ids : num_ids + len(own)]

    def finish(self, request_id: str) -> None:
        self._own.pop(request_id, None)

    def reset(self) -> None:
        self._own.clear()

    def _own_tokens(self, request: Request) -> OwnTokens:
        own = self._own.pop(request.id, None)
        if own is None or own.source is not request.tokens or own.num_seen > len(request.tokens):
            own = OwnTokens(self._head, self._native)
            own.source = request.tokens
        self._own[request.id] = own  # the last used one is the last
        while len(self._own) > self._max_requests:
            del self._own[next(iter(self._own))]
        own.add(request.tokens, self._drafted)
        return own


class OwnTokens:
    """The tokens of a request that are not in the draft vocabulary, and their rows of the target's head."""

    def __init__(self, head: Head, native: Native) -> None:
        self.ids = np.zeros(MAX_OWN, np.int64)
        self.num_seen = 0  # tokens of the request
        self.source: Sequence[int] = ()  # the request's list of tokens: another request may have the same id later
        self._known: set[int] = set()
        self._head = head
        self._native = native
        self._weights: list[PanelWeight] = []

    def __len__(self) -> int:
        return len(self._known)

    def add(self, tokens: Sequence[int], drafted: NDArray[np.bool_]) -> None:
        """Add what is new since the last call."""
        new: list[int] = []
        for token in tokens[self.num_seen :]:
            if not drafted[token] and token not in self._known and len(self) < MAX_OWN:
                self._known.add(token)
                new.append(token)
        self.num_seen = len(tokens)
        if new:
            self._pack(np.array(new, np.int64))

    def multiply(self, states: Floats, out: Floats) -> None:
        """Write the products to the first columns of `out`."""
        first = 0
        for weight in self._weights:
            num_rows = min(weight.shape[0], len(self) - first)
            products = weight.matmul(states)
            out[:, first : first + num_rows] = products[:, :num_rows]
            first += num_rows

    def _pack(self, new: Ids) -> None:
        """Pack the panels that get new rows. Their other rows are those of earlier tokens, or zero."""
        first = len(self) - len(new)
        self.ids[first : len(self)] = new
        begin, end = first // ROWS_IN_PANEL * ROWS_IN_PANEL, -(-len(self) // ROWS_IN_PANEL) * ROWS_IN_PANEL
        rows = np.zeros((end - begin, self._head.weight.shape[1]), np.float32)
        rows[: len(self) - begin] = self._head.weight.rows(self.ids[begin : len(self)])
        start = 0  # of a matrix
        for index, size in enumerate(OWN_SIZES):
            low, high = max(begin, start), min(end, start + size)
            if low < high:
                if index == len(self._weights):
                    panels = make_panels(size, rows.shape[1], self._native)
                    self._weights.append(PanelWeight([panels], self._native))
                (panels,) = self._weights[index].panels
                panels.pack_dense("f32", address(rows[low - begin :]), rows.shape[1], low - start, high - low)
            start += size


class WholeVocabulary:
    """A matrix of its own for each place, of the target's whole vocabulary."""

    def __init__(self, weights: Sequence[Any], head: Head, max_rows: int) -> None:
        self._weights = weights
        self._head = head
        self._buffer = np.empty((max_rows, padded(weights[0].shape[0])), np.float32)

    def logits(self, states: Floats, requests: Sequence[Request]) -> Floats:
        num_requests, depth, _ = states.shape
        logits = self._buffer[: num_requests * depth, : self._weights[0].shape[0]]
        for place, weight in enumerate(self._weights):
            weight.multiply(np.ascontiguousarray(states[:, place]), logits[place::depth])
        return cap(self._head, logits)

    def token_ids(self, request: Request, columns: Ids) -> Ids:
        return columns

    def finish(self, request_id: str) -> None:
        pass

    def reset(self) -> None:
        pass


class OneMatrix:
    """One matrix for all places: a head's own, whose rows are those of `ids`, or the target's."""

    def __init__(self, weight: Any, ids: Ids | None, softcap: float | None, ops: Kernels, max_rows: int) -> None:
        self._weight = weight
        self._ids = ids
        self._softcap = softcap
        self._ops = ops
        self._buffer = np.empty((max_rows, padded(weight.shape[0])), np.float32)

    def logits(self, states: Floats, requests: Sequence[Request]) -> Floats:
        num_requests, depth, size = states.shape
        logits = self._buffer[: num_requests * depth, : self._weight.shape[0]]
        self._weight.multiply(states.reshape(-1, size), logits)
        capped: Floats = self._ops.logits(logits, self._softcap)
        return capped

    def token_ids(self, request: Request, columns: Ids) -> Ids:
        return columns if self._ids is None else self._ids[columns]

    def finish(self, request_id: str) -> None:
        pass

    def reset(self) -> None:
        pass


def cap(head: Head, products: Floats) -> Floats:
    logits: Floats = head.ops.logits(products, head.softcap)
    return logits


def gather(head: Head, ids: Ids, native: Native) -> Any:
    """Panels with some rows of the target's head."""
    panels = make_panels(len(ids), head.weight.shape[1], native)
    for first in range(0, len(ids), GATHER_ROWS):
        rows = np.ascontiguousarray(head.weight.rows(ids[first : first + GATHER_ROWS]), np.float32)
        panels.pack_dense("f32", address(rows), rows.shape[1], first, len(rows))
    return panels


def make_panels(rows: int, cols: int, native: Native) -> Any:
    return native.module.Panels("f32" if cols % PANEL_BLOCK else "q8_0", rows, cols)
