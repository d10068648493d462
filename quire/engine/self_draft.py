"""SelfDraft: drafts from the target's own first layers and an exit. It is a proposer.

A draft pass writes the target's keys and values of these layers at the drafts' slots. They are what the verifying step
would write there, so that step computes only the later layers of these tokens (`split_steps.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.core.drafts import Drafts
from quire.core.plan import Plan
from quire.core.request import Request
from quire.engine.batch import BatchBuffers
from quire.engine.exit_logits import MAX_ROWS, ExitLogits
from quire.engine.kept_states import KeptStates
from quire.engine.sampling_state import settings_of, signed
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
        rows: list[Row] = []
        found: list[Drafts | None] = [None] * len(requests)
        for index, (request, most) in enumerate(zip(requests, max_drafts, strict=True)):
            depth = min(most, self._reserve(request, most)) if most else 0
            if depth:
                found[index] = drafts = Drafts([], None, [], self.name)
                rows.append(Row(request, depth, drafts))
                self._kept.begin(request, len(request.tokens) - 1)
        while rows:
            for first in range(0, len(rows), MAX_ROWS):
                some = rows[first : first + MAX_ROWS]
                self._draw(some, self._run(some))
            rows = [row for row in rows if len(row.drafts) < row.depth]
        return found

    def finish(self, request_id: str) -> None:
        self._exit_logits.finish(request_id)
        self._kept.drop(request_id)

    def reset(self) -> None:
        self._exit_logits.reset()
        self._kept.reset()

    def _run(self, rows: Sequence[Row]) -> Floats:
        """Compute the first layers of each row's last token. Returns their states, which are kept."""
        requests = [row.request for row in rows]
        starts = [len(row.request.tokens) - 1 + len(row.drafts) for row in rows]
        ones = [1] * len(rows)
        last = {index: Drafts([row.last_token]) for index, row in enumerate(rows) if len(row.drafts)}
        batch = self._buffers.fill(Plan(0, requests, starts, ones, ones, last))
        states = self._model.first(batch.tokens, batch.positions, batch.paging)
        for row, state in zip(rows, states, strict=True):
            self._kept.add(row.request, row.last_token, state)
        return states

    def _draw(self, rows: Sequence[Row], states: Floats) -> None:
        """The next draft of each row, sampled with the request's noise, as the target will sample. As with a draft
        model, nothing is cut off by top-k, top-p and min-p.
        """
        arrays = self._ops.arrays
        with np.errstate(all="ignore"):  # a head may have any values; what is no number becomes no draft
            logits = self._exit_logits(states, [row.request for row in rows])
            settings = [(settings_of(row.request.params)[0], 0, 1.0, -math.inf) for row in rows]
            tokens, max_logits = self._ops.sample(
                logits.copy(),
                arrays.put(settings, "float64"),
                arrays.put([signed(row.request.seed) for row in rows], "int64"),
                arrays.put([len(row.request.tokens) + len(row.drafts) for row in rows], "int64"),
            )
            logprobs = self._ops.logprobs(logits, tokens, 0)[0]
        columns = zip(rows, tokens.tolist(), max_logits.tolist(), logprobs.tolist(), strict=True)
        for row, token, max_logit, logprob in columns:
            if not math.isfinite(max_logit) or not math.isfinite(logprob):
                row.depth = len(row.drafts)
                continue
            row.drafts.tokens.append(token)
            row.drafts.odds.append(MAX_ODDS * self._odds(math.exp(logprob)))


@dataclass(slots=True)
class Row:
    """A request while drafts are made for it."""

    request: Request
    depth: int
    drafts: Drafts

    @property
    def last_token(self) -> int:
        return self.drafts.tokens[-1] if len(self.drafts) else self.request.tokens[-1]
