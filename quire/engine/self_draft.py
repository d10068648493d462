"""SelfDraft: drafts from the target's own first layers and an exit. It is a proposer.

A draft pass writes the target's keys and values of these layers at the drafts' slots. They are what the verifying step
would write there, so that step computes only the later layers of these tokens (`split_steps.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from quire.core.drafts import Drafts
from quire.core.request import Request
from quire.engine.batch import BatchBuffers
from quire.engine.draft_chains import DraftChain, begin_chains, draw_drafts, plan_pass
from quire.engine.exit_logits import MAX_ROWS, ExitLogits
from quire.engine.kept_states import KeptStates
from quire.kernels import Kernels
from quire.kernels.cpu.split import SplitModel

MAX_ODDS = 0.98  # of a draft whose probability is 1

Floats = NDArray[np.float32]


class SelfDraft:
    """`odds` is the chance that a draft is right, by its probability. `reserve` allocates blocks for drafts
    (`Scheduler.reserve`)."""

    name = "self"
    is_parallel = False
    drafts_per_pass = 1

    def __init__(
        self,
        model: SplitModel,
        exit_logits: ExitLogits,
        odds: Callable[[float], float],
        kept: KeptStates,
        buffers: BatchBuffers,
        ops: Kernels,
        reserve: Callable[[Request, int], int],
    ) -> None:
        self._model = model
        self._exit_logits = exit_logits
        self._odds = odds
        self._kept = kept
        self._buffers = buffers
        self._ops = ops
        self._reserve = reserve

    def catch_up(self, requests: Sequence[Request]) -> None:
        """Nothing is missing: the target's own keys and values are read."""

    def propose_requests(self, requests: Sequence[Request], max_drafts: Sequence[int]) -> list[Drafts | None]:
        """A chain for each request."""
        chains = begin_chains(self.name, requests, max_drafts, self._reserve)
        left = [chain for chain in chains if chain is not None]
        for chain in left:
            self._kept.begin(chain.request, len(chain.request.tokens) - 1)
        while left:
            for first in range(0, len(left), MAX_ROWS):
                some = left[first : first + MAX_ROWS]
                with np.errstate(all="ignore"):  # a head may have any values
                    logits = self._exit_logits(self._run(some), [chain.request for chain in some])
                draw_drafts(some, logits, self._odds_of, self._ops)
            left = [chain for chain in left if not chain.is_done]
        return [None if chain is None else chain.drafts for chain in chains]

    def finish(self, request_id: str) -> None:
        self._exit_logits.finish(request_id)
        self._kept.drop(request_id)

    def reset(self) -> None:
        self._exit_logits.reset()
        self._kept.reset()

    def _run(self, chains: Sequence[DraftChain]) -> Floats:
        """Compute the first layers of each chain's last token. Returns their states, which are kept."""
        batch = self._buffers.fill(plan_pass(chains))
        states = self._model.first(batch.tokens, batch.positions, batch.paging)
        for chain, state in zip(chains, states, strict=True):
            self._kept.add(chain.request, chain.last_token, state)
        return states

    def _odds_of(self, probability: float) -> float:
        return MAX_ODDS * self._odds(probability)
