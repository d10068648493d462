"""SplitSteps: runs steps on a model whose first layers end at an exit. The runner calls it in place of the model.

The first layers are computed for the tokens whose states are not kept, and the later ones for the rows that do not
exit. A token's bits do not depend on the other tokens of a pass, so they are those of the whole model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quire.core.plan import Plan
from quire.engine.batch import Batch
from quire.engine.early_exit import EarlyExit, can_wait
from quire.engine.kept_states import KeptStates
from quire.engine.sampler import Sampler
from quire.kernels.cpu.split import SplitModel
from quire.kernels.paging import skip_tokens

Floats = NDArray[np.float32]


@dataclass(slots=True)
class SplitOutput:
    """What a step computed. Rows that wait have no hidden states and taps after the exit; theirs are 0."""

    states: Floats  # [tokens, hidden_size] after the first layers
    hidden: Floats  # [tokens, hidden_size]
    taps: list[Floats]
    exits: dict[int, int] = field(default_factory=dict)  # by row: the token that the exit chose
    waiting: set[int] = field(default_factory=set)  # of these, the rows whose later layers were not computed


class SplitSteps:
    """`early_exit` is given if requests may exit."""

    def __init__(self, model: SplitModel, kept: KeptStates, early_exit: EarlyExit | None = None) -> None:
        self.model = model
        self.kept = kept
        self.early_exit = early_exit

    def run(self, plan: Plan, batch: Batch, sampler: Sampler) -> SplitOutput:
        states = self._first(plan, batch)
        self.kept.reset()
        exits: dict[int, int] = {}
        if self.early_exit is not None:
            exits = self.early_exit.choose(plan, batch.samples, states, sampler)
        waiting = {row for row in exits if can_wait(plan, row)}
        if waiting:
            hidden, taps = self._second_without(waiting, batch, states)
            self._keep(plan, batch, states, waiting)
        else:
            hidden = self.model.second(states, batch.positions, batch.paging)
            taps = self.model.taps
        return SplitOutput(states, hidden, taps, exits, waiting)

    def finish(self, request_id: str) -> None:
        """A request has ended."""
        self.kept.drop(request_id)
        if self.early_exit is not None:
            self.early_exit.exit_logits.finish(request_id)

    def reset(self) -> None:
        self.kept.reset()
        if self.early_exit is not None:
            self.early_exit.exit_logits.reset()

    def _first(self, plan: Plan, batch: Batch) -> Floats:
        """The states of all tokens of the step after the first layers."""
        kept = self._find_kept(plan, batch)
        if not any(kept):
            return self.model.first(batch.tokens, batch.positions, batch.paging)
        states = np.empty((len(batch.tokens), self.model.hidden_size), np.float32)
        for first, own in zip(batch.paging.host_query_starts, kept, strict=False):
            for offset, state in enumerate(own):
                states[first + offset] = state
        index, paging = skip_tokens(batch.paging, list(map(len, kept)))
        if len(index):
            states[index] = self.model.first(batch.tokens[index], batch.positions[index], paging)
        return states

    def _find_kept(self, plan: Plan, batch: Batch) -> list[list[Floats]]:
        """The kept states of each row's first tokens. Nodes of a tree may have other slots than the chain that was
        drafted; and taps of the first layers are not kept, so if there are any, all tokens are computed.
        """
        if not len(self.kept) or self.model.num_first_taps:
            return []
        kept: list[list[Floats]] = []
        tokens, query_starts = batch.tokens.tolist(), batch.paging.host_query_starts
        for row, (request, start) in enumerate(zip(plan.requests, plan.starts, strict=True)):
            has_tree = row in plan.drafts and not plan.drafts[row].is_chain
            own = tokens[query_starts[row] : query_starts[row + 1]]
            kept.append([] if has_tree else self.kept.find(request, start, own))
        return kept

    def _second_without(self, waiting: set[int], batch: Batch, states: Floats) -> tuple[Floats, list[Floats]]:
        """The hidden states and taps of a step in which some rows wait."""
        model, counts = self.model, np.diff(batch.paging.host_query_starts).tolist()
        skips = [count if row in waiting else 0 for row, count in enumerate(counts)]
        index, paging = skip_tokens(batch.paging, skips)
        hidden = np.zeros_like(states)
        first_taps = model.taps_of_first(len(states))
        if not len(index):
            return hidden, [*first_taps, *(np.zeros_like(states) for _ in range(model.num_second_taps))]
        hidden[index] = model.second(states[index], batch.positions[index], paging)
        taps = []
        for found in model.taps[model.num_first_taps :]:
            taps.append(np.zeros_like(states))
            taps[-1][index] = found
        return hidden, [*first_taps, *taps]

    def _keep(self, plan: Plan, batch: Batch, states: Floats, waiting: set[int]) -> None:
        tokens, query_starts = batch.tokens.tolist(), batch.paging.host_query_starts
        for row in waiting:
            self.kept.begin(plan.requests[row], plan.starts[row])
            for index in range(query_starts[row], query_starts[row + 1]):
                self.kept.add(plan.requests[row], tokens[index], states[index])
