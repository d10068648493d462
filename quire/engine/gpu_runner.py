"""GpuRunner: runs plans on a GPU without waiting for them, so that the next one is planned meanwhile.

Sampled tokens stay on the device, where the next step finds them; the host reads them one step late. Steps that only
decode, and the layers of mixed steps that are not large, are captured as CUDA graphs (`gpu_graphs.py`); all others are
launched op by op, which takes the host less time than they take the GPU. What a step takes is measured by the GPU.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.core.params import SamplingParams
from quire.core.plan import Plan, Sampled, TokenLogprobs
from quire.core.request import Request
from quire.engine.batch import Batch
from quire.engine.cache import CacheTensors
from quire.engine.gpu_batch import GpuBuffers, is_drawn
from quire.engine.gpu_graphs import Graphs, Key
from quire.engine.logits import Position, change, send
from quire.engine.runner import DoneStep, ModelRunner, RunningStep
from quire.engine.sampler import Report, report, tell
from quire.kernels import Kernels
from quire.kernels.cuda.best import BestFinder
from quire.kernels.cuda.feed import feed
from quire.kernels.cuda.sample import Draws, TokenSampler
from quire.kernels.paging import Ends
from quire.models.decoder import Decoder

DEPTH = 2  # plans launched before the first is taken in
MIXED_ROWS = 128  # of a captured step with prompts, unless it is crowded


def arriving(x: Tensor) -> Tensor:
    """A copy that will be on the host when the stream has come so far."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def looks_back(request: Request, start: int) -> bool:
    """Whether a row's step yields more than one token, or is asked about tokens that its prompt has already."""
    scores_prompt = request.params.prompt_logprobs is not None and start < request.num_prompt - 1
    return scores_prompt or bool(request.drafts)


@dataclass(slots=True)
class Landing:
    """Where a step's tokens and their scores arrive on the host, and the events of its begin and of their arrival."""

    tokens: Tensor
    scores: Tensor
    begun: torch.cuda.Event
    arrived: torch.cuda.Event

    @property
    def seconds(self) -> float:
        return float(self.begun.elapsed_time(self.arrived)) / 1e3


@dataclass(slots=True)
class Told:
    """What is known of some rows beside their tokens: log probabilities that are on their way to the host."""

    rows: list[int]
    reported: Report


@dataclass(slots=True)
class GpuStep:
    """A plan under way on the GPU."""

    runner: GpuRunner
    plan: Plan
    landing: Landing
    told: Told | None

    def is_done(self) -> bool:
        try:
            return bool(self.landing.arrived.query())  # type: ignore[no-untyped-call]
        except RuntimeError:  # an earlier kernel failed: `wait` says so
            return True

    def wait(self) -> Sampled:
        return self.runner.take_in(self.plan, self.landing, self.told)


class GpuRunner(ModelRunner):
    """A ModelRunner that works ahead of what the host has read, unless sampling needs to know it."""

    buffers: GpuBuffers

    def __init__(
        self, model: Decoder, cache: CacheTensors, buffers: GpuBuffers, ops: Kernels, graph_bytes: int
    ) -> None:
        super().__init__(model, cache, buffers, ops)
        device, max_rows = ops.device, buffers.max_rows
        self.max_rows = max_rows
        self._tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)  # the last step's, by row
        self._scores = torch.zeros(max_rows, dtype=torch.float32, device=device)
        self._landings = deque(
            Landing(
                torch.zeros(max_rows, dtype=torch.int64, pin_memory=True),
                torch.zeros(max_rows, dtype=torch.float32, pin_memory=True),
                torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
                torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
            )
            for _ in range(DEPTH + 1)
        )
        self._find_best = BestFinder(max_rows, device)
        vocab_size = model.head.weight.shape[0]
        self._draw = TokenSampler(max_rows, vocab_size, model.head.softcap, device)
        self._draw_changed = TokenSampler(max_rows, vocab_size, None, device)  # from logits that are capped already
        self._rows: dict[str, int] = {}  # of the last plan
        self.depth = DEPTH
        self.graphs = Graphs(self._run_captured, max_rows, buffers.max_tokens, graph_bytes)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> RunningStep:
        landing = self._landings[0]
        landing.begun.record()
        self.cache.swap_blocks(plan.swap_out, plan.swap_in)
        self.cache.copy_blocks(plan.copies)
        if any(map(looks_back, plan.requests, plan.starts)):
            self.depth = 1
            return self._launch_and_wait(plan)
        changed = [row for row, request in enumerate(plan.requests) if request.changes_logits and plan.yields[row]]
        self.depth = 1 if changed else DEPTH
        hidden = self._run_decode(plan) if plan.num_tokens == len(plan) else self._run_mixed(plan)
        if changed:
            self._choose_again(plan, hidden, changed)
        told = self._report(plan, hidden)
        self._remember(plan)
        self._send_home(landing, len(plan))
        return GpuStep(self, plan, landing, told)

    def _launch_and_wait(self, plan: Plan) -> RunningStep:
        """Steps that need hidden states of more than each row's last token: computed here and now."""
        begin_s = time.perf_counter()
        batch = self.buffers.fill(plan, self._rows)
        self._feed(batch, len(plan))
        sampled = self._finish(plan, batch)
        tokens = [taken[-1] if taken else 0 for taken in sampled.tokens]
        self._tokens[: len(plan)] = torch.tensor(tokens, dtype=torch.int64).to(self.ops.device)
        self._remember(plan)
        sampled.seconds = time.perf_counter() - begin_s
        return DoneStep(sampled)

    def _choose_again(self, plan: Plan, hidden: Tensor, rows: list[int]) -> None:
        """For rows whose logits are changed before a token is chosen: by what the host knows, so it must know all."""
        index, requests = self._column(rows), [plan.requests[row] for row in rows]
        places = [plan.starts[row] + plan.counts[row] for row in rows]
        logits = self.model.logits(hidden[index])
        positions = [Position(request, request.tokens, place) for request, place in zip(requests, places, strict=True)]
        assert all(len(tokens) == place for _, tokens, place in positions), "a token that the host has not seen yet"
        change(logits, positions)
        tokens, scores = torch.empty_like(index), logits.new_empty(len(rows))
        self._draw_changed(logits, self.buffers.send_draws(requests), self._column(places), tokens, scores)
        self._tokens[index], self._scores[index] = tokens, scores

    def _report(self, plan: Plan, hidden: Tensor) -> Told | None:
        """Log probabilities for rows that ask for them, from the logits as they are."""
        nums_top = [request.params.logprobs for request in plan.requests]
        rows = [row for row, num_top in enumerate(nums_top) if num_top is not None and plan.yields[row]]
        if not rows:
            return None
        index = self._column(rows)
        logprobs = torch.log_softmax(self.model.logits(hidden[index]), -1)
        reported = report(logprobs, self._tokens[index], max(nums_top[row] or 0 for row in rows))
        return Told(rows, Report(*map(arriving, reported)))

    def _column(self, numbers: list[int]) -> Tensor:
        return send(numbers, np.int64, self.ops.device)

    def _remember(self, plan: Plan) -> None:
        self._rows = {request.id: row for row, request in enumerate(plan.requests)}

    def _feed(self, batch: Batch, num_rows: int) -> None:
        """Put tokens that the host does not know yet in their places."""
        if batch.feeds is not None:
            feed(batch.tokens, batch.paging.query_starts, batch.feeds, self._tokens, num_rows)

    def _choose(self, hidden: Tensor, draws: Draws | None, seq_lens: Tensor) -> None:
        """A token for each row. How many tokens a row has is the place of its next one, by which it is drawn."""
        products = self.model.products(hidden)
        if draws is None:
            self._find_best(products, self._tokens, self._scores)
        else:
            self._draw(products, draws, seq_lens, self._tokens, self._scores)

    def _send_home(self, landing: Landing, num_rows: int) -> None:
        self._landings.rotate(-1)
        landing.tokens[:num_rows].copy_(self._tokens[:num_rows], non_blocking=True)
        landing.scores[:num_rows].copy_(self._scores[:num_rows], non_blocking=True)
        landing.arrived.record()

    def take_in(self, plan: Plan, landing: Landing, told: Told | None) -> Sampled:
        """A step's tokens, when they have arrived."""
        landing.arrived.synchronize()
        tokens, scores = landing.tokens[: len(plan)].tolist(), landing.scores[: len(plan)].tolist()
        known: dict[int, TokenLogprobs] = {}
        if told is not None:
            nums_top = [plan.requests[row].params.logprobs or 0 for row in told.rows]
            known = dict(zip(told.rows, tell(told.reported, [tokens[row] for row in told.rows], nums_top), strict=True))
        sampled = Sampled([[] for _ in range(len(plan))], seconds=landing.seconds)
        for row, num_yields in enumerate(plan.yields):
            if num_yields:
                token = tokens[row] if math.isfinite(scores[row]) else None
                self._accept(plan, sampled, row, token, known.get(row))
        return sampled

    def _run_decode(self, plan: Plan) -> Tensor:
        """Rows of one token each, from the feeding of tokens to the choosing of the next ones -> hidden [rows or more].

        The choice of the likeliest is captured with the rest. Draws are launched after it: what they take differs, and
        the logits of every size would be kept with its graph.
        """
        kinds = ("layers", "decode") if is_drawn(plan) else ("decode",)
        found = [key for kind in kinds if (key := self.graphs.find(kind, len(plan))) is not None]
        assert found, "the largest step of single tokens is captured when the engine is built"
        key = min(found, key=lambda key: key.size)
        self.buffers.fill_decode(plan, self._rows, key.size)
        draws = self.buffers.fill_draws(plan)
        hidden = self.graphs.replay(key)
        if draws is not None:
            self._choose(hidden, draws, self.buffers.seq_lens.view(key.size))
        return hidden

    def _run_mixed(self, plan: Plan) -> Tensor:
        """Chunks of prompts, and single tokens among them -> hidden [rows]."""
        kind = "crowded" if len(plan) > MIXED_ROWS else "mixed" if 1 in plan.counts else "prompts"
        key = self.graphs.find(kind, plan.num_tokens)
        if key is not None and self.buffers.has_room(plan, key.size):
            self.buffers.fill_mixed(plan, self._rows, key.size, self._most_rows(kind))
            draws = self.buffers.fill_draws(plan)
            hidden = self.graphs.replay(key)[: len(plan)]
        else:
            batch = self.buffers.fill(plan, self._rows)
            draws = self.buffers.fill_draws(plan)
            hidden = self._forward(batch, len(plan), batch.paging.ends())
        self._choose(hidden, draws, self.buffers.seq_lens.view(len(plan)))
        return hidden

    def _forward(self, batch: Batch, num_rows: int, ends: Ends | None = None) -> Tensor:
        self._feed(batch, num_rows)
        return self.model(batch.tokens, batch.positions, batch.paging, self.cache.layers, ends)

    def _run_captured(self, key: Key) -> Tensor:
        """A step of the kind and size that a graph has, on the buffers as they are."""
        if key.kind in ("decode", "layers"):
            batch = self.buffers.decode_batch(key.size)
            hidden = self._forward(batch, key.size)
            if key.kind == "decode":
                self._choose(hidden, None, batch.paging.seq_lens)
            return hidden
        rows = self._most_rows(key.kind)
        batch = self.buffers.mixed_batch(key.size, rows, has_singles=key.kind != "prompts")
        return self._forward(batch, rows, self.buffers.ends_of(batch, rows))

    def _most_rows(self, kind: str) -> int:
        """Of a captured step with prompts."""
        return self.max_rows if kind == "crowded" else min(MIXED_ROWS, self.max_rows)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture the first steps, when all else is in place. Every kernel is run by that, so that no request waits for
        one to be compiled or loaded."""
        self.buffers.fill_nothing(self.buffers.max_tokens, self.max_rows)
        self.graphs.begin(("mixed", "prompts", "crowded") if self.max_rows > MIXED_ROWS else ("mixed", "prompts"))
        self._draw_once()

    def _draw_once(self) -> None:
        key = self.graphs.find("decode", 1)
        assert key is not None
        hidden = self.graphs.replay(key)
        draws = self.buffers.send_draws([Request("", [0], SamplingParams(top_k=2, top_p=0.5))])
        self._choose(hidden, draws, self.buffers.seq_lens.view(key.size))
        logits, places = self.model.logits(hidden[:1]), self._column([0])
        self._draw_changed(logits, draws, places, self._tokens, self._scores)

    def idle(self, seconds: float) -> bool:
        return self.graphs.capture_next(seconds)
