"""Draft heads as proposers: from the hidden states of a request's last computed token to a tree of drafts.

The runner hands the states of each step to `RequestFeatures`, which keeps those of each request's last token. A head
(`block_head.py`, `medusa.py`) makes states for the next places of all requests in one pass, an output makes logits of
them (`draft_vocabulary.py`), and `HeadProposer` makes trees of their best candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.core.drafts import Drafts
from quire.core.plan import Plan, Sampled
from quire.core.request import Request
from quire.engine.draft_vocabulary import DraftOutput
from quire.engine.runner import StepStates
from quire.engine.sampling_state import settings_of, signed
from quire.kernels import Kernels
from quire.kernels.cpu.native import Native
from quire.kernels.cpu.tape import address
from quire.speculative.draft_tree import CONFIDENT, MAX_CHILDREN, MIN_SURVIVAL, Candidates

NUM_CANDIDATES = 32  # of each place
MAX_ROWS = 64  # places of all requests in one pass

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


class Feature(NamedTuple):
    """Hidden states of a request's last computed token: after each tapped layer, and after the last norm."""

    num_computed: int  # tokens of the request
    states: Floats  # [taps + 1, hidden_size]


class RequestFeatures:
    """The features of running requests. It is a `StepListener`. The last used `max_requests` are kept."""

    def __init__(self, max_requests: int) -> None:
        self._features: dict[str, Feature] = {}
        self._max_requests = max_requests

    def keep(self, plan: Plan, sampled: Sampled, states: StepStates) -> None:
        for row, request in enumerate(plan.requests):
            if not sampled.tokens[row] or row in sampled.exited:
                continue  # a part of a prompt, a beam, or a token whose later layers are not computed
            index, num_computed = last_computed(plan, sampled, row, states.query_starts)
            rows = [*(tap[index] for tap in states.taps), states.hidden[index]]
            self._features.pop(request.id, None)
            self._features[request.id] = Feature(num_computed, np.stack(rows))
        while len(self._features) > self._max_requests:
            del self._features[next(iter(self._features))]

    def find(self, request: Request) -> Floats | None:
        """[taps + 1, hidden_size], or None if they are not those of the token before the last one."""
        feature = self._features.get(request.id)
        if feature is None or feature.num_computed != len(request.tokens) - 1:
            return None
        return feature.states

    def finish(self, request_id: str) -> None:
        self._features.pop(request_id, None)

    def reset(self) -> None:
        self._features.clear()


def last_computed(plan: Plan, sampled: Sampled, row: int, query_starts: Sequence[int]) -> tuple[int, int]:
    """The index in the step of the row's last token that is right, and how many tokens of the request are computed."""
    if row not in plan.drafts:
        return query_starts[row + 1] - 1, plan.starts[row] + plan.counts[row]
    path = sampled.accepted[row]
    node = 1 + path[-1] if path else 0
    return query_starts[row] + node, plan.starts[row] + 1 + len(path)


class Bigrams(NamedTuple):
    """What the token before adds to the scores of candidates: the product of two rows. Ids without a row have position
    -1, and nothing is added."""

    before: Floats  # [ids, rank]
    after: Floats  # [ids, rank]
    positions: Ids  # [vocab]


class DraftHead(Protocol):
    """Makes states for the next places of requests."""

    @property
    def depth(self) -> int:
        """How many places."""
        ...

    @property
    def bigrams(self) -> Bigrams | None: ...

    def states(self, requests: Sequence[Request], features: Floats) -> Floats:
        """features [requests, taps + 1, hidden_size] -> [requests, depth, hidden_size], the input of the output."""
        ...


class HeadProposer:
    """A `ModelProposer` on a draft head. All drafts of a call come from one pass."""

    is_parallel = True
    drafts_per_pass = 1

    def __init__(
        self, name: str, head: DraftHead, output: DraftOutput, features: RequestFeatures, ops: Kernels
    ) -> None:
        self.name = name
        self._head = head
        self._output = output
        self._features = features
        self._ops = ops
        assert ops.native is not None
        self._native = ops.native

    def catch_up(self, requests: Sequence[Request]) -> None:
        """Nothing is missing: a head reads the target's states and cache."""

    def propose_requests(self, requests: Sequence[Request], max_drafts: Sequence[int]) -> list[Drafts | None]:
        found: list[Drafts | None] = [None] * len(requests)
        rows: list[tuple[int, Floats]] = []  # the index of a request, and its features
        for index, (request, most) in enumerate(zip(requests, max_drafts, strict=True)):
            if most and (feature := self._features.find(request)) is not None:
                rows.append((index, feature))
        size = max(1, MAX_ROWS // self._head.depth)
        for first in range(0, len(rows), size):
            indices, features = zip(*rows[first : first + size], strict=True)
            chosen, limits = [requests[index] for index in indices], [max_drafts[index] for index in indices]
            for index, tree in zip(indices, self._propose(chosen, np.stack(features), limits), strict=True):
                found[index] = tree
        return found

    def finish(self, request_id: str) -> None:
        self._features.finish(request_id)
        self._output.finish(request_id)

    def reset(self) -> None:
        self._features.reset()
        self._output.reset()

    def _propose(self, requests: Sequence[Request], features: Floats, max_drafts: Sequence[int]) -> list[Drafts]:
        with np.errstate(all="ignore"):  # a head may have any values; what is no number becomes no draft
            logits = self._output.logits(self._head.states(requests, features), requests)
            columns, logprobs = self._ops.beam_candidates(logits, None, NUM_CANDIDATES, 0)[:2]
            return self._grow(requests, columns, logprobs, max_drafts)

    def _grow(
        self, requests: Sequence[Request], columns: Ids, logprobs: Floats, max_drafts: Sequence[int]
    ) -> list[Drafts]:
        """columns, logprobs [requests * depth, candidates]"""
        depth, trees = self._head.depth, list[Drafts]()
        for nth, (request, most) in enumerate(zip(requests, max_drafts, strict=True)):
            own = slice(nth * depth, (nth + 1) * depth)
            tokens = self._output.token_ids(request, columns[own])
            tree = grow_native(request, tokens, logprobs[own], most, self._head.bigrams, self._native)
            tree.source = self.name
            trees.append(tree)
        return trees


def grow_native(
    request: Request, tokens: Ids, logprobs: Floats, max_nodes: int, bigrams: Bigrams | None, native: Native
) -> Drafts:
    """`grow_tree` on `find_candidates`, in C++. tokens, logprobs [depth, candidates]"""
    assert max_nodes >= 1
    kept, parents = np.empty(max_nodes, np.int64), np.empty(max_nodes, np.int64)
    chances = np.empty(max_nodes, np.float64)
    tokens, logprobs = np.ascontiguousarray(tokens, np.int64), np.ascontiguousarray(logprobs, np.float32)
    arrays = (0, 0, 0, 0, 0)
    if bigrams is not None:
        before, after, positions = bigrams
        arrays = (address(before), address(after), address(positions), before.shape[1], len(positions))
    count = native.module.grow_tree(
        (address(tokens), address(logprobs), *tokens.shape),
        (settings_of(request.params)[0], signed(request.seed), len(request.tokens)),
        arrays, max_nodes, MAX_CHILDREN, MIN_SURVIVAL, (address(kept), address(parents), address(chances)),
    )  # fmt: skip
    return Drafts(kept[:count].tolist(), parents[:count].tolist(), (CONFIDENT * chances[:count]).tolist())


def find_candidates(request: Request, tokens: Ids, logprobs: Floats, ops: Kernels, first: int = 0) -> list[Candidates]:
    """tokens, logprobs [depth, candidates] -> candidates of each place, with the noise that the target will use.

    The first place has `first` drafts before it. Places after one with a value that is not a number are left out.
    """
    valid: NDArray[np.bool_] = np.isfinite(logprobs)
    usable = [bool(row.any()) and not bool(nan.any()) for row, nan in zip(valid, np.isnan(logprobs), strict=True)]
    depth = usable.index(False) if False in usable else len(usable)
    temperature = settings_of(request.params)[0]
    scores = logprobs
    if temperature > 0 and depth:
        lengths = len(request.tokens) + first + np.arange(len(tokens))
        seeds = np.full(len(tokens), signed(request.seed), np.int64)
        scores = logprobs + np.float32(temperature) * ops.gumbel(seeds, lengths, tokens)
    places: list[Candidates] = []
    for place in range(depth):
        kept = valid[place]
        rest = 0.0 if temperature > 0 else 1.0 - float(np.exp(logprobs[place][kept]).sum())
        places.append(Candidates(tokens[place][kept], scores[place][kept], rest))
    return places
