"""GpuRunner: runs plans on a GPU without waiting for them, so that the next one is planned meanwhile.

Sampled tokens stay on the device, where the next step finds them; the host reads them one step late. Steps that only
decode, and the layers of mixed steps that are not large, are captured as CUDA graphs (`gpu_graphs.py`); all others are
launched op by op, which takes the host less time than they take the GPU. What a step takes is measured by the GPU.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.core.plan import Plan, Sampled
from quire.engine.batch import Batch, Samples
from quire.engine.cache import CacheTensors
from quire.engine.gpu_batch import GpuBuffers
from quire.engine.gpu_graphs import Graphs, Key
from quire.engine.gpu_sampler import GpuSampler
from quire.engine.runner import ModelRunner, RunningStep, Scores, collect, scores_prompt, select_samples
from quire.engine.sampler import BeamTensors, Choice, LogprobsTensors
from quire.kernels import Kernels
from quire.kernels.cuda.sampling.last_tokens import fill_last_tokens
from quire.kernels.paging import Ends
from quire.models.decoder import Decoder

DEPTH = 2  # plans launched before the first is taken in
MIXED_ROWS = 128  # of a captured step with prompts, unless it is crowded


def arriving(x: Tensor) -> Tensor:
    """A copy that will be on the host when the stream has come so far."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


@dataclass(slots=True)
class HostOutputs:
    """Where a step's tokens arrive on the host, and the events of its begin and of their arrival."""

    tokens: Tensor
    largest: Tensor
    begun: torch.cuda.Event
    arrived: torch.cuda.Event

    @property
    def seconds(self) -> float:
        return float(self.begun.elapsed_time(self.arrived)) / 1e3


@dataclass(slots=True)
class GpuStep:
    """A plan under way on the GPU."""

    runner: GpuRunner
    plan: Plan
    samples: Samples
    hidden: Tensor  # [samples or more, hidden_size]
    outputs: HostOutputs
    scores: list[Scores] = field(default_factory=list)
    choice: Choice | None = None  # on its way to the host

    @property
    def must_land(self) -> bool:
        return any(self.samples.nums_drafts)

    def is_done(self) -> bool:
        if self.choice is None:
            return False
        try:
            return bool(self.outputs.arrived.query())  # type: ignore[no-untyped-call]
        except RuntimeError:  # an earlier kernel failed: `wait` says so
            return True

    @torch.inference_mode()
    def sample(self) -> None:
        if self.choice is not None:
            return
        choice = self.runner.sampler.choose(self.samples, self.hidden)
        outputs, count = self.outputs, len(self.samples)
        outputs.tokens[:count].copy_(choice.tokens, non_blocking=True)
        outputs.largest[:count].copy_(choice.largest, non_blocking=True)
        reported = None if choice.report is None else LogprobsTensors(*map(arriving, choice.report))
        beams = None if choice.beams is None else BeamTensors(*map(arriving, choice.beams))
        self.scores = [
            Scores(row, targets, LogprobsTensors(*map(arriving, report))) for row, targets, report in self.scores
        ]
        outputs.arrived.record()
        self.choice = Choice(
            outputs.tokens[:count], outputs.largest[:count], choice.reported, reported, choice.searched, beams
        )  # fmt: skip

    def wait(self) -> Sampled:
        self.runner.num_under_way -= 1
        assert self.choice is not None, "the plan before was not committed"
        self.outputs.arrived.synchronize()
        return collect(self.plan, self.samples, self.choice, self.scores, self.outputs.seconds)


class GpuRunner(ModelRunner):
    """A ModelRunner that works ahead of what the host has read."""

    buffers: GpuBuffers
    sampler: GpuSampler
    depth = DEPTH

    def __init__(
        self, model: Decoder, cache: CacheTensors, buffers: GpuBuffers, ops: Kernels, graph_bytes: int
    ) -> None:
        super().__init__(model, cache, buffers, ops)
        self.sampler = GpuSampler(model, buffers, ops)
        self.max_rows = buffers.max_rows
        self.num_under_way = 0  # plans that are launched and not taken in
        self._outputs = deque(
            HostOutputs(
                torch.zeros(buffers.max_tokens, dtype=torch.int64, pin_memory=True),
                torch.zeros(buffers.max_tokens, dtype=torch.float32, pin_memory=True),
                torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
                torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
            )
            for _ in range(DEPTH + 1)
        )
        self.graphs = Graphs(self._run_captured, self.max_rows, buffers.max_tokens, graph_bytes)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> RunningStep:
        outputs = self._outputs[0]
        self._outputs.rotate(-1)
        outputs.begun.record()
        self.cache.swap_blocks(plan.swap_out, plan.swap_in)
        self.cache.copy_blocks(plan.copies)
        is_decode = plan.num_tokens == len(plan) and all(plan.yields)
        step = self._run_decode(plan, outputs) if is_decode else self._run_mixed(plan, outputs)
        if not self.num_under_way or not self.buffers.state.asked.needs_tokens:
            step.sample()
        self.num_under_way += 1
        return step

    def reset(self) -> None:
        super().reset()
        self.num_under_way = 0

    def _run_decode(self, plan: Plan, outputs: HostOutputs) -> GpuStep:
        """Rows of one token each."""
        key = self.graphs.find("decode", len(plan))
        assert key is not None, "the largest step of single tokens is captured when the engine is built"
        samples = self.buffers.fill_decode(plan, key.size)
        return GpuStep(self, plan, samples, self.graphs.replay(key), outputs)

    def _run_mixed(self, plan: Plan, outputs: HostOutputs) -> GpuStep:
        """Chunks of prompts, drafts, and single tokens among them."""
        if any(scores_prompt(plan, row) for row in range(len(plan))):
            return self._run_scored(plan, outputs)
        rows = max(len(plan), sum(plan.yields))
        kind = "crowded" if rows > MIXED_ROWS else "mixed" if 1 in plan.counts else "prompts"
        key = self.graphs.find(kind, plan.num_tokens) if rows <= self.max_rows else None
        if key is not None and self.buffers.has_room(plan, key.size):
            samples = self.buffers.fill_mixed(plan, key.size, self._most_rows(kind))
            return GpuStep(self, plan, samples, self.graphs.replay(key), outputs)
        batch, ends = self.buffers.fill_eager(plan)
        return GpuStep(self, plan, batch.samples, self._forward(batch, len(plan), ends), outputs)

    def _run_scored(self, plan: Plan, outputs: HostOutputs) -> GpuStep:
        """A step that is asked about tokens of prompts: its last layer is computed for all tokens."""
        batch, _ = self.buffers.fill_eager(plan)
        hidden = self._forward(batch, len(plan))
        scores = self._score(plan, batch, hidden)
        return GpuStep(self, plan, batch.samples, select_samples(hidden, batch.samples), outputs, scores=scores)

    def _forward(self, batch: Batch, num_rows: int, ends: Ends | None = None) -> Tensor:
        if batch.last_token_entries is not None:
            entries, last_tokens = batch.last_token_entries, self.sampler.last_tokens
            fill_last_tokens(batch.tokens, batch.paging.query_starts, entries, last_tokens, num_rows)
        return self.model(batch.tokens, batch.positions, batch.paging, self.cache.layers, ends)

    def _run_captured(self, key: Key) -> Tensor:
        """A step of the kind and size that a graph has, on the buffers as they are."""
        if key.kind == "decode":
            return self._forward(self.buffers.decode_batch(key.size), key.size)
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
        key = self.graphs.find("decode", 1)
        assert key is not None
        self.sampler.prepare(self.graphs.replay(key))

    def idle(self, seconds: float) -> bool:
        return self.graphs.capture_next(seconds)
