"""EagleProposer: dynamic trees of drafts from an EAGLE head or an MTP layer, on quire's CPU kernels.

The head's keys and values are one more layer in the target's blocks. After each step the target's states of its tokens
are kept. When drafts are wanted, the head computes those tokens (`catch_up`), and then grows a tree, one pass a depth.
Its nodes' keys are in blocks that are reserved for drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from quire.core.block_pool import BlockPool
from quire.core.drafts import ROOT, Drafts
from quire.core.plan import Plan, Sampled
from quire.core.request import Request
from quire.engine.draft_vocabulary import DraftOutput
from quire.engine.heads import MAX_ROWS, NUM_CANDIDATES, find_candidates
from quire.engine.recorded_eagle import EagleRow, RecordedEagle
from quire.engine.runner import StepStates
from quire.engine.token_states import FilledBlocks, TokenStates
from quire.kernels import Kernels
from quire.speculative.draft_tree import MAX_CHILDREN, rank
from quire.speculative.dynamic_tree import DynamicTree

WIDTH = 2  # nodes of a depth that get children
MAX_NODES = 20  # of a tree that the head computes
MAX_RECENT = 16  # tokens of a request that are computed with the first depth
MAX_STATE_BYTES = 128 << 20  # of all requests

Floats = NDArray[np.float32]


@dataclass(slots=True)
class Growth:
    """A request while a tree is made for it.

    `nodes` are those that the head computes, at most `max_nodes`, in the order of their slots. The head has made the
    features in `following`.
    """

    request: Request
    begin: int  # see EagleRow
    max_nodes: int
    max_depth: int
    tree: DynamicTree
    following: dict[int, Floats]  # by node; of ROOT those of the last token
    nodes: list[int] = field(default_factory=list)
    num_new: int = 0  # of these: the last ones, of the deepest depth

    @property
    def new_nodes(self) -> list[int]:
        return self.nodes[len(self.nodes) - self.num_new :]

    @property
    def start(self) -> int:
        """The position of the first drafted token's features."""
        return len(self.request.tokens) - 1

    def row(self) -> EagleRow:
        index = {node: nth for nth, node in enumerate(self.nodes)}
        parents = [self.tree.parents[node] for node in self.nodes]
        return EagleRow(
            self.request,
            self.begin,
            self.start,
            [self.tree.tokens[node] for node in self.nodes],
            np.stack([self.following[parent] for parent in parents]),
            [index.get(parent, ROOT) for parent in parents],
        )


class EagleProposer:
    """A `ModelProposer` and a `StepListener`.

    The head reads the taps at `tap_indices`, or without any the final states. `group` is that of its layer in the
    cache. `reserve` allocates blocks for drafts (`Scheduler.reserve`), `pool` returns the block pool. `width` nodes of
    a depth get children; with 1 a tree is a chain.
    """

    is_parallel = False

    def __init__(
        self,
        name: str,
        recorded: RecordedEagle,
        output: DraftOutput,
        tap_indices: Sequence[int],
        ops: Kernels,
        *,
        group: int,
        block_size: int,
        max_tokens: int,
        pool: Callable[[], BlockPool],
        reserve: Callable[[Request, int], int],
        width: int = WIDTH,
        max_bytes: int = MAX_STATE_BYTES,
    ) -> None:
        self.name = name
        self.drafts_per_pass = width
        self.blocks = FilledBlocks(block_size, pool)
        self.states = TokenStates(max_bytes)
        self._recorded = recorded
        self._output = output
        self._tap_indices = tap_indices
        self._ops = ops
        self._group = group
        self._max_tokens = max_tokens
        self._reserve = reserve
        self._width = width
        self._max_children = MAX_CHILDREN if width > 1 else 1
        self._is_called = False  # set for ever by a call that raises: then nobody calls again

    def keep(self, plan: Plan, sampled: Sampled, states: StepStates) -> None:
        if self._is_called:
            self.reset()
            return
        for source, target in plan.copies:
            self.blocks.copy(source, target)
        for row, request in enumerate(plan.requests):
            table, start = request.tables[self._group], plan.starts[row]
            self.blocks.truncate(table, start, start + plan.counts[row])
            may_be_drafted = request.beam is None and request.params.early_exit is None
            if may_be_drafted and not request.finished:
                self.states.add(request.id, start, self._states_of(plan, sampled, row, states))

    def catch_up(self, requests: Sequence[Request]) -> None:
        """Compute tokens until few are left, which `propose_requests` computes."""
        self._is_called = True
        rows: list[EagleRow] = []
        for request in requests:
            row = self._find_row(request)
            if row is not None and (excess := len(row.tokens) - MAX_RECENT) > 0:
                row.tokens, row.features = row.tokens[:excess], row.features[:excess]
                rows.append(row)
        self._compute(rows)
        self._is_called = False

    def propose_requests(self, requests: Sequence[Request], max_drafts: Sequence[int]) -> list[Drafts | None]:
        self._is_called = True
        found: list[Drafts | None] = [None] * len(requests)
        rows: list[tuple[int, EagleRow]] = []
        for index, (request, most) in enumerate(zip(requests, max_drafts, strict=True)):
            if most and (row := self._find_row(request)) is not None:
                rows.append((index, row))
        size = MAX_ROWS // self._width
        for first in range(0, len(rows), size):
            indices = [index for index, _ in rows[first : first + size]]
            trees = self._propose(
                [row for _, row in rows[first : first + size]], [max_drafts[each] for each in indices]
            )
            for index, tree in zip(indices, trees, strict=True):
                found[index] = tree
        self._is_called = False
        return found

    def finish(self, request_id: str) -> None:
        self.states.finish(request_id)
        self._output.finish(request_id)

    def reset(self) -> None:
        self.states.reset()
        self.blocks.reset()
        self._output.reset()

    def _states_of(self, plan: Plan, sampled: Sampled, row: int, states: StepStates) -> Floats:
        """[tokens, width]: those of the row's tokens that are right."""
        sources = [states.taps[index] for index in self._tap_indices] or [states.hidden]
        first = states.query_starts[row]
        if row not in plan.drafts:
            return np.concatenate([each[first : first + plan.counts[row]] for each in sources], axis=1)
        indices = [first, *(first + 1 + node for node in sampled.accepted.get(row, []))]
        return np.concatenate([each[indices] for each in sources], axis=1)

    def _find_row(self, request: Request) -> EagleRow | None:
        """The tokens that are not computed yet, and always the last one that the target has computed. None if their
        states are missing, or keys before them in their block."""
        table, last = request.tables[self._group], len(request.tokens) - 2
        run = self.states.find(request.id, last + 1)
        if run is None:
            return None
        start = self.blocks.find_stop(table, run.start, last)
        begin = self.blocks.find_begin(table, start)
        start = max(start, begin)
        if start > last:
            return None
        features = np.concatenate(run.parts)[start - run.start :]
        return EagleRow(request, begin, start, request.tokens[start + 1 : last + 2], features)

    def _compute(self, rows: Sequence[EagleRow]) -> list[tuple[Floats, Floats]]:
        """Compute rows in passes of `max_tokens`. Returns for each the outputs of its last token."""
        outputs: dict[int, tuple[Floats, Floats]] = {}
        batch: list[tuple[int, EagleRow]] = []
        for index, row in enumerate(rows):
            for piece in split(row, self._max_tokens):
                if sum(len(each.tokens) for _, each in batch) + len(piece.tokens) > self._max_tokens:
                    outputs |= self._run(batch)
                    batch = []
                batch.append((index, piece))
        outputs |= self._run(batch)
        return [outputs[index] for index in range(len(rows))]

    def _run(self, batch: Sequence[tuple[int, EagleRow]]) -> dict[int, tuple[Floats, Floats]]:
        if not batch:
            return {}
        states, following = self._recorded.compute([row for _, row in batch])
        outputs: dict[int, tuple[Floats, Floats]] = {}
        last = -1
        for index, row in batch:
            self.blocks.fill(row.request.tables[self._group], row.start, row.stop)
            last += len(row.tokens)
            outputs[index] = states[last].copy(), following[last].copy()
        return outputs

    def _propose(self, rows: Sequence[EagleRow], max_drafts: Sequence[int]) -> list[Drafts]:
        computed = self._compute(rows)
        growths: list[Growth] = []
        for row, (_, following), most in zip(rows, computed, max_drafts, strict=True):
            self.states.keep_last(row.request.id)
            depth = -(-most // self._width)
            room = self._reserve(row.request, most - 1) if depth > 1 else 0
            num_nodes = min(room, most, MAX_NODES)
            growths.append(Growth(row.request, row.begin, num_nodes, depth, DynamicTree(), {ROOT: following}))
        with np.errstate(all="ignore"):  # a head may have any values; what is no number becomes no draft
            self._add_children(growths, [[ROOT]] * len(growths), [states[None] for states, _ in computed], 0)
            growing, depth = growths, 1
            while growing := [each for each in growing if each.max_depth > depth and self._extend(each)]:
                self._grow(growing, depth)
                depth += 1
        trees = [growth.tree.drafts(most) for growth, most in zip(growths, max_drafts, strict=True)]
        for tree in trees:
            tree.source = self.name
        return trees

    def _extend(self, growth: Growth) -> bool:
        """Choose the nodes that get children. Returns whether there are any."""
        count = min(self._width, growth.max_nodes - len(growth.nodes))
        chosen = growth.tree.likeliest(count) if count > 0 else []
        growth.nodes += chosen
        growth.num_new = len(chosen)
        return bool(chosen)

    def _grow(self, growths: Sequence[Growth], depth: int) -> None:
        """Compute the nodes of each tree, and add the children of the new ones. All nodes are computed again: the own
        tokens of a paging row are those that it computes."""
        states, following = self._recorded.draft([growth.row() for growth in growths])
        first = 0
        new_states: list[Floats] = []
        for growth in growths:
            first += len(growth.nodes) - growth.num_new
            new = slice(first, first + growth.num_new)
            growth.following |= zip(growth.new_nodes, following[new].copy(), strict=True)
            new_states.append(states[new].copy())
            first += growth.num_new
        self._add_children(growths, [growth.new_nodes for growth in growths], new_states, depth)

    def _add_children(
        self, growths: Sequence[Growth], parents: Sequence[Sequence[int]], states: Sequence[Floats], depth: int
    ) -> None:
        """states [parents, hidden_size] of each request: the output's input. `depth` is that of the parents."""
        num_rows = max(map(len, parents))
        padded = np.zeros((len(growths), num_rows, states[0].shape[1]), np.float32)
        for nth, own in enumerate(states):
            padded[nth, : len(own)] = own
        logits = self._output.logits(padded, [growth.request for growth in growths])
        columns, logprobs = self._ops.beam_candidates(logits, None, NUM_CANDIDATES, 0)[:2]
        for nth, (growth, nodes) in enumerate(zip(growths, parents, strict=True)):
            children: list[tuple[int, list[tuple[float, int]]]] = []
            for row, node in enumerate(nodes, nth * num_rows):
                tokens = self._output.token_ids(growth.request, columns[row : row + 1])
                for place in find_candidates(growth.request, tokens, logprobs[row : row + 1], self._ops, depth):
                    children.append((node, rank(place, None)[: self._max_children]))
            growth.tree.add(children)


def split(row: EagleRow, max_tokens: int) -> list[EagleRow]:
    """Parts of a chain, of at most `max_tokens` tokens each."""
    return [
        replace(
            row,
            start=row.start + first,
            tokens=row.tokens[first : first + max_tokens],
            features=row.features[first : first + max_tokens],
        )
        for first in range(0, len(row.tokens), max_tokens)
    ]
