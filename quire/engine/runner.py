"""Runner: computes one plan with a model and gives back what was sampled. It keeps no requests and makes no decisions.

`launch` is the whole seam to the scheduler; a fake one that returns numbers stands in for it in the core's tests.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.core.plan import Plan, Sampled, TokenLogprobs
from quire.engine.batch import Batch, BatchBuffers
from quire.engine.cache import CacheTensors
from quire.engine.logits import Position
from quire.engine.sampler import report, sample, tell
from quire.kernels import Kernels
from quire.models.decoder import Decoder

SCORED_AT_ONCE = 64  # prompt positions whose logits are held at the same time


class RunningStep(Protocol):
    """A plan that has been launched."""

    def is_done(self) -> bool:
        """Whether its tokens are there already."""
        ...

    def wait(self) -> Sampled:
        """Its tokens. Called once, in the order of launches."""
        ...


@dataclass(frozen=True, slots=True)
class DoneStep:
    """A plan that was computed when it was launched."""

    sampled: Sampled

    def is_done(self) -> bool:
        return True

    def wait(self) -> Sampled:
        return self.sampled


class Runner(Protocol):
    @property
    def depth(self) -> int:
        """How many plans may be launched before the first of them is taken in."""
        ...

    def launch(self, plan: Plan) -> RunningStep:
        """Begin to compute the plan's rows.

        A row whose next token could not be chosen is in `Sampled.failed`.
        """
        ...

    def prepare(self) -> None:
        """Called once, before the first plan."""
        ...

    def idle(self, seconds: float) -> bool:
        """Prepare for later plans while the host has nothing to do for so long; False if there is nothing to prepare
        that would be done by then."""
        ...


class Places(NamedTuple):
    """Positions whose next token is wanted: the plan's row, and the place in the step."""

    rows: list[int]
    places: list[int]

    def add(self, row: int, place: int) -> None:
        self.rows.append(row)
        self.places.append(place)


class ModelRunner:
    """A model, its cache and its buffers. It computes a plan when it is launched."""

    depth = 1

    def __init__(self, model: Decoder, cache: CacheTensors, buffers: BatchBuffers, ops: Kernels) -> None:
        self.model = model
        self.cache = cache
        self.buffers = buffers
        self.ops = ops

    @torch.inference_mode()
    def launch(self, plan: Plan) -> RunningStep:
        begin_s = time.perf_counter()
        self.cache.swap_blocks(plan.swap_out, plan.swap_in)
        self.cache.copy_blocks(plan.copies)
        sampled = self._finish(plan, self.buffers.fill(plan))
        sampled.seconds = time.perf_counter() - begin_s
        return DoneStep(sampled)

    def prepare(self) -> None:
        pass

    def idle(self, seconds: float) -> bool:
        return False

    def _finish(self, plan: Plan, batch: Batch) -> Sampled:
        """Run the model on a batch and choose its rows' tokens."""
        hidden = self.model(batch.tokens, batch.positions, batch.paging, self.cache.layers)
        ends = batch.paging.host_query_starts[1:]
        sampled = self._sample(plan, hidden, ends)
        for row, request in enumerate(plan.requests):
            if request.params.prompt_logprobs is not None and plan.starts[row] < request.num_prompt - 1:
                sampled.prompt_logprobs[row] = self._score(plan, row, hidden, ends[row])
        return sampled

    def _sample(self, plan: Plan, hidden: Tensor, ends: list[int]) -> Sampled:
        """Requests that take the likeliest token get it without a look at all logits; the others are sampled."""
        sampled = Sampled([[] for _ in range(len(plan))])
        best, drawn = Places([], []), Places([], [])
        positions: list[Position] = []
        for row, (request, num_yields) in enumerate(zip(plan.requests, plan.yields, strict=True)):
            for num_drafts in range(num_yields):
                (best if request.takes_best else drawn).add(row, ends[row] - num_yields + num_drafts)
                if not request.takes_best:
                    assert not num_drafts or request.constraint is None, "a constraint knows no drafts"
                    before = request.tokens + request.drafts[:num_drafts] if num_drafts else request.tokens
                    place = plan.starts[row] + plan.counts[row] - num_yields + num_drafts + 1
                    assert len(before) == place or not request.changes_logits, "what looks at tokens must know them all"
                    positions.append(Position(request, before, place))
        if best.rows:
            likeliest, scores = self.model.best(hidden, best.places)
            for row, found, score in zip(best.rows, likeliest, scores, strict=True):
                self._accept(plan, sampled, row, found if math.isfinite(score) else None, None)
        if drawn.rows:
            logits = self.model.logits(hidden[torch.tensor(drawn.places, device=hidden.device)])
            for row, token, scored in zip(drawn.rows, *sample(logits, positions, self.ops), strict=True):
                self._accept(plan, sampled, row, token, scored)
        return sampled

    def _accept(self, plan: Plan, sampled: Sampled, row: int, token: int | None, scored: TokenLogprobs | None) -> None:
        """Take a position's token if every draft before it was right: then sampling one by one gives the same."""
        taken = sampled.tokens[row]
        if row in sampled.failed or taken != plan.requests[row].drafts[: len(taken)]:
            return
        if token is None:
            sampled.failed.append(row)
            return
        taken.append(token)
        if (constraint := plan.requests[row].constraint) is not None:
            constraint.advance(token)
        if scored is not None:
            sampled.logprobs.setdefault(row, []).append(scored)

    def _score(self, plan: Plan, row: int, hidden: Tensor, end: int) -> list[TokenLogprobs]:
        """Log probabilities of the prompt tokens that this row's positions predict."""
        request, start, count = plan.requests[row], plan.starts[row], plan.counts[row]
        first = end - count
        targets = request.tokens[start + 1 : min(start + count + 1, request.num_prompt)]
        num_top = request.params.prompt_logprobs or 0
        scores: list[TokenLogprobs] = []
        for begin in range(0, len(targets), SCORED_AT_ONCE):
            chunk = targets[begin : begin + SCORED_AT_ONCE]
            logits = self.model.logits(hidden[first + begin : first + begin + len(chunk)])
            logprobs = torch.log_softmax(logits, -1)
            reported = report(logprobs, torch.tensor(chunk, device=hidden.device), num_top)
            scores += tell(reported, chunk, [num_top] * len(chunk))
        return scores
