"""Runner: computes one plan with a model and gives back what was sampled. It keeps no requests and makes no decisions.

Every plan goes the same way: its blocks are moved, its batch is filled, the model runs, a token is chosen at every
sample of the batch, and what was chosen is read. `launch` is the whole seam to the scheduler; a fake one that returns
numbers stands in for it in the core's tests.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.core.plan import Plan, Sampled, TokenLogprobs
from quire.engine.batch import Batch, BatchBuffers, Samples
from quire.engine.cache import CacheTensors
from quire.engine.sampler import Choice, LogprobsTensors, Sampler, to_candidates, to_token_logprobs
from quire.kernels import Kernels
from quire.models.decoder import Decoder

SCORED_AT_ONCE = 64  # prompt positions whose logits are held at the same time


class RunningStep(Protocol):
    """A plan that has been launched."""

    @property
    def must_land(self) -> bool:
        """Whether no other plan can be made before this one's tokens are known: it verifies drafts."""
        ...

    def is_done(self) -> bool:
        """Whether its tokens are there already."""
        ...

    def sample(self) -> None:
        """Choose its tokens, if that had to wait for the tokens of the plan before. Called when these are committed."""
        ...

    def wait(self) -> Sampled:
        """Its tokens. Called once, in the order of launches."""
        ...


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

    def reset(self) -> None:
        """Plans were dropped: forget what is known of requests."""
        ...


class Scores(NamedTuple):
    """Log probabilities of some of a prompt's tokens."""

    row: int  # of the plan
    targets: Sequence[int]
    report: LogprobsTensors


@dataclass(slots=True)
class Step:
    """A plan under way: its samples, the hidden states at them, and what was chosen."""

    runner: ModelRunner
    plan: Plan
    samples: Samples
    hidden: Tensor  # [samples or more, hidden_size]
    scores: list[Scores] = field(default_factory=list)
    choice: Choice | None = None
    begin_s: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0

    @property
    def must_land(self) -> bool:
        return any(self.samples.nums_drafts)

    def is_done(self) -> bool:
        return self.choice is not None

    def sample(self) -> None:
        if self.choice is None:
            self.choice = self.runner.sampler.choose(self.samples, self.hidden)
            self.seconds = time.perf_counter() - self.begin_s

    def wait(self) -> Sampled:
        assert self.choice is not None
        return collect(self.plan, self.samples, self.choice, self.scores, self.seconds)


class ModelRunner:
    """A model, its cache and its buffers. It computes a plan when it is launched."""

    depth = 1

    def __init__(self, model: Decoder, cache: CacheTensors, buffers: BatchBuffers, ops: Kernels) -> None:
        self.model = model
        self.cache = cache
        self.buffers = buffers
        self.ops = ops
        self.sampler = Sampler(model, buffers.state, ops)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> RunningStep:
        begin_s = time.perf_counter()
        self.cache.swap_blocks(plan.swap_out, plan.swap_in)
        self.cache.copy_blocks(plan.copies)
        batch = self.buffers.fill(plan)
        assert batch.last_token_entries is None, "a token that the host does not know"
        hidden = self.model(batch.tokens, batch.positions, batch.paging, self.cache.layers)
        step = Step(
            self, plan, batch.samples, select_samples(hidden, batch.samples), self._score(plan, batch, hidden),
            begin_s=begin_s,
        )  # fmt: skip
        step.sample()
        return step

    def prepare(self) -> None:
        pass

    def idle(self, seconds: float) -> bool:
        return False

    def reset(self) -> None:
        self.buffers.state.clear()

    def _score(self, plan: Plan, batch: Batch, hidden: Tensor) -> list[Scores]:
        """Log probabilities of prompt tokens, for requests that ask for them. hidden [tokens, hidden_size]"""
        scores: list[Scores] = []
        for row, request in enumerate(plan.requests):
            if not scores_prompt(plan, row):
                continue
            first, start, count = batch.paging.host_query_starts[row], plan.starts[row], plan.counts[row]
            targets = request.tokens[start + 1 : min(start + count + 1, request.num_prompt)]
            for begin in range(0, len(targets), SCORED_AT_ONCE):
                chunk = targets[begin : begin + SCORED_AT_ONCE]
                states = hidden[first + begin : first + begin + len(chunk)]
                report = self.sampler.score(states, chunk, request.params.prompt_logprobs or 0)
                scores.append(Scores(row, chunk, report))
        return scores


def scores_prompt(plan: Plan, row: int) -> bool:
    """Whether a row computes tokens of a prompt whose log probabilities were asked for."""
    request = plan.requests[row]
    return request.params.prompt_logprobs is not None and plan.starts[row] < request.num_prompt - 1


def select_samples(hidden: Tensor, samples: Samples) -> Tensor:
    """hidden [tokens, hidden_size] -> [samples, hidden_size]"""
    if samples.indices == list(range(len(hidden))):
        return hidden
    return hidden[torch.tensor(samples.indices, dtype=torch.int64, device=hidden.device)]


def collect(
    plan: Plan, samples: Samples, choice: Choice, scores: Sequence[Scores], seconds: float | None = None
) -> Sampled:
    """What a step produced. Its choice is on the host."""
    sampled = Sampled([[] for _ in range(len(plan))], seconds=seconds)
    tokens, largest = choice.tokens.tolist(), choice.largest.tolist()
    told: dict[int, TokenLogprobs] = {}
    if choice.report is not None:
        nums_top = [samples.requests[nth].params.logprobs or 0 for nth in choice.reported]
        theirs = to_token_logprobs(choice.report, [tokens[nth] for nth in choice.reported], nums_top)
        told = dict(zip(choice.reported, theirs, strict=True))
    if choice.beams is not None:
        beams = [samples.requests[nth] for nth in choice.searched]
        for nth, candidates in zip(choice.searched, to_candidates(choice.beams, beams), strict=True):
            sampled.candidates[samples.rows[nth]] = candidates
    for nth, row in enumerate(samples.rows):
        if samples.requests[nth].finished or samples.requests[nth].beam is not None:
            continue  # it ended with the step before, which the host had not read when this one was planned; or a beam
        accept(plan, sampled, row, tokens[nth] if math.isfinite(largest[nth]) else None, told.get(nth))
    for row, targets, report in scores:
        num_top = plan.requests[row].params.prompt_logprobs or 0
        sampled.prompt_logprobs.setdefault(row, []).extend(to_token_logprobs(report, targets, [num_top] * len(targets)))
    return sampled


def accept(plan: Plan, sampled: Sampled, row: int, token: int | None, logprobs: TokenLogprobs | None) -> None:
    """Take a sample's token if every draft before it was right: then sampling one by one gives the same."""
    taken = sampled.tokens[row]
    if row in sampled.failed or taken != plan.requests[row].drafts[: len(taken)]:
        return
    if token is None:
        sampled.failed.append(row)
        return
    taken.append(token)
    if logprobs is not None:
        sampled.logprobs.setdefault(row, []).append(logprobs)
