"""GpuRunner: runs plans on a GPU asynchronously, so that the host plans the next step meanwhile.

Sampled tokens stay on the device, where the next step reads them. The host reads them one step late. Decode steps, and
the layers of small mixed steps, are captured as CUDA graphs (`gpu_graphs.py`). Larger steps are launched op by op; the
GPU needs longer for them than the host. Durations of steps are measured with CUDA events.
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
from quire.engine.gpu_drafter import GpuDrafter
from quire.engine.gpu_graphs import Graphs, Key
from quire.engine.gpu_sampler import GpuSampler
from quire.engine.runner import ModelRunner, PromptLogprobs, RunningStep, collect, has_prompt_logprobs, select_samples
from quire.engine.sampler import BeamArrays, LogprobsArrays, SamplerOutput
from quire.kernels import Kernels
from quire.kernels.cuda.attention.verify import MAX_QUERIES, QUERIES, round_queries
from quire.kernels.cuda.move import TokenMover
from quire.kernels.cuda.sampling.accept import MAX_NODES, accept_drafts
from quire.kernels.cuda.sampling.last_tokens import fill_last_tokens
from quire.kernels.paging import Ends
from quire.models.decoder import Decoder
from quire.speculative.drafting import DEPTHS

DEPTH = 2  # plans in flight
MIXED_ROWS = 128  # of a captured step with prompts, unless its kind is `crowded`
VERIFY_KINDS = ("verify", "trees")  # of graphs for steps of drafts


def copy_to_host(x: Tensor) -> Tensor:
    """An asynchronous copy to pinned memory."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


@dataclass(slots=True)
class HostOutputs:
    """Pinned memory for a step's tokens, and the events of its start and of the end of the copies."""

    tokens: Tensor
    max_logits: Tensor
    num_accepted: Tensor  # by row, of drafts that the device has made
    start_event: torch.cuda.Event
    done_event: torch.cuda.Event

    @property
    def seconds(self) -> float:
        return float(self.start_event.elapsed_time(self.done_event)) / 1e3


@dataclass(slots=True)
class GpuStep:
    """A plan in flight on the GPU."""

    runner: GpuRunner
    plan: Plan
    samples: Samples
    hidden: Tensor  # [samples or more, hidden_size]
    host_outputs: HostOutputs
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    output: SamplerOutput | None = None  # being copied to the host
    key: Key | None = None  # of the graph that ran it, if it has no prompts
    batch: Batch | None = None  # its input, if it has prompts and there is a drafter

    @property
    def must_commit_first(self) -> bool:
        return bool(self.samples.drafts or self.plan.drafted)

    def is_done(self) -> bool:
        if self.output is None:
            return False
        try:
            return bool(self.host_outputs.done_event.query())  # type: ignore[no-untyped-call]
        except RuntimeError:  # an earlier kernel failed: `wait` raises its error
            return True

    @torch.inference_mode()
    def sample(self) -> None:
        if self.output is not None:
            return
        output = self.runner.sampler.sample(self.samples, self.hidden)
        host_outputs, count = self.host_outputs, len(self.samples)
        if self.samples.drafts or self.plan.drafted:
            self.runner.accept(self.plan, output)
            host_outputs.num_accepted[: len(self.plan)].copy_(
                self.runner.num_accepted[: len(self.plan)], non_blocking=True
            )
        host_outputs.tokens[:count].copy_(output.tokens, non_blocking=True)
        host_outputs.max_logits[:count].copy_(output.max_logits, non_blocking=True)
        logprobs = None if output.logprobs is None else LogprobsArrays(*map(copy_to_host, output.logprobs))
        beams = None if output.beams is None else BeamArrays(*map(copy_to_host, output.beams))
        self.prompt_logprobs = [
            PromptLogprobs(row, targets, LogprobsArrays(*map(copy_to_host, tensors)))
            for row, targets, tensors in self.prompt_logprobs
        ]
        host_outputs.done_event.record()
        self.runner.draft(self)
        self.output = SamplerOutput(
            host_outputs.tokens[:count],
            host_outputs.max_logits[:count],
            output.logprobs_indices,
            logprobs,
            output.beam_indices,
            beams,
        )

    def wait(self) -> Sampled:
        assert self.output is not None, "the plan before was not committed"
        self.host_outputs.done_event.synchronize()
        nums_right = self.host_outputs.num_accepted[: len(self.plan)].tolist() if self.plan.drafts else []
        return collect(
            self.plan, self.samples, self.output, self.prompt_logprobs, self.host_outputs.seconds, nums_right
        )  # fmt: skip


class GpuRunner(ModelRunner):
    """A ModelRunner that launches the next plan before the host has read the last tokens."""

    buffers: GpuBuffers
    sampler: GpuSampler
    depth = DEPTH

    def __init__(
        self,
        model: Decoder,
        cache: CacheTensors,
        buffers: GpuBuffers,
        ops: Kernels,
        graph_bytes: int,
        *,
        speculates: bool = False,
        drafter: GpuDrafter | None = None,
    ) -> None:
        """`speculates`: steps of drafts are captured when the engine is built, too."""
        super().__init__(model, cache, buffers, ops)
        device = torch.device(ops.device)
        self._speculates = speculates
        self._drafter = drafter
        buffers.has_drafter = drafter is not None
        self.num_accepted = torch.zeros(buffers.max_rows, dtype=torch.int32, device=device)  # by row of the step
        self._accepted_paths = torch.zeros(buffers.max_rows, MAX_NODES, dtype=torch.int32, device=device)
        self._move_tokens = TokenMover(cache.stored_layers, len(buffers.tables), device)
        self.sampler = GpuSampler(model.head, buffers, ops)
        self.max_rows = buffers.max_rows
        self._host_outputs = deque(
            HostOutputs(
                torch.zeros(buffers.max_tokens, dtype=torch.int64, pin_memory=True),
                torch.zeros(buffers.max_tokens, dtype=torch.float32, pin_memory=True),
                torch.zeros(buffers.max_rows, dtype=torch.int32, pin_memory=True),
                torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
                torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
            )
            for _ in range(DEPTH + 1)
        )
        self.graphs = Graphs(self._run_captured, self.max_rows, buffers.max_tokens, graph_bytes, self._find_drafting)

    @torch.inference_mode()
    def launch(self, plan: Plan, is_behind: bool = False) -> RunningStep:
        host_outputs = self._host_outputs[0]
        self._host_outputs.rotate(-1)
        host_outputs.start_event.record()
        if self._drafter is not None and (plan.swap_out or plan.swap_in or plan.copies):
            self._drafter.compute_kept()
        self.cache.swap_blocks(plan.swap_out, plan.swap_in)
        self.cache.copy_blocks(plan.copies)
        if self._drafter is None or has_tree(plan):
            plan.drafted.clear()
        if plan.num_tokens == len(plan) and all(plan.yields):
            step = self._run_decode(plan, host_outputs)
        else:
            step = self._run_verify(plan, host_outputs) or self._run_mixed(plan, host_outputs)
        if not (is_behind and self.buffers.state.flags.needs_tokens):
            step.sample()
        return step

    def _run_decode(self, plan: Plan, host_outputs: HostOutputs) -> GpuStep:
        """A step whose rows have one token each."""
        key = self.graphs.find("decode", len(plan))
        assert key is not None, "the largest decode step is captured when the engine is built"
        samples = self.buffers.fill_decode(plan, key.size)
        return GpuStep(self, plan, samples, self.graphs.replay(key), host_outputs, key=key)

    def _run_verify(self, plan: Plan, host_outputs: HostOutputs) -> GpuStep | None:
        """A step of drafts and single tokens, without prompts, if a captured graph serves it.

        Exact attention computes chains as it does trees.
        """
        if plan.counts != plan.yields or max(plan.counts) > MAX_QUERIES:
            return None
        has_trees = self.ops.exact or has_tree(plan)
        key = self.graphs.find("trees" if has_trees else "verify", plan.num_tokens, round_queries(max(plan.counts)))
        if key is None or any(has_prompt_logprobs(plan, row) for row in range(len(plan))):
            return None
        samples = self.buffers.fill_verify(plan, key.size, key.max_queries, has_trees=has_trees)
        return GpuStep(self, plan, samples, self.graphs.replay(key), host_outputs, key=key)

    def _run_mixed(self, plan: Plan, host_outputs: HostOutputs) -> GpuStep:
        """A step with prompt chunks or drafts, and possibly decode rows."""
        plan.drafted.clear()
        if has_tree(plan) or any(has_prompt_logprobs(plan, row) for row in range(len(plan))):
            return self._run_whole(plan, host_outputs)
        rows = max(len(plan), sum(plan.yields))
        kind = "crowded" if rows > MIXED_ROWS else "mixed" if 1 in plan.counts else "prompts"
        key = self.graphs.find(kind, plan.num_tokens) if rows <= self.max_rows else None
        if key is not None and self.buffers.has_room(plan, key.size):
            max_rows = self._max_rows_of(kind)
            samples = self.buffers.fill_mixed(plan, key.size, max_rows)
            batch = self.buffers.mixed_batch(key.size, max_rows, has_singles=kind != "prompts")
            return GpuStep(self, plan, samples, self.graphs.replay(key), host_outputs, batch=batch)
        batch, ends = self.buffers.fill_eager(plan)
        hidden = self._forward(batch, len(plan), ends)
        return GpuStep(self, plan, batch.samples, hidden, host_outputs, batch=batch)

    def _run_whole(self, plan: Plan, host_outputs: HostOutputs) -> GpuStep:
        """A step whose last layer is computed for all tokens: it has prompt log probabilities, or trees that no graph
        serves."""
        batch, _ = self.buffers.fill_eager(plan)
        hidden = self._forward(batch, len(plan))
        prompt_logprobs = self._prompt_logprobs(plan, batch, hidden)
        return GpuStep(
            self,
            plan,
            batch.samples,
            select_samples(hidden, batch.samples, self.ops.arrays),
            host_outputs,
            prompt_logprobs=prompt_logprobs,
            batch=batch,
        )

    def _forward(
        self, batch: Batch, num_rows: int, ends: Ends | None = None, *, may_have_drafts: bool = True
    ) -> Tensor:
        if batch.last_token_entries is not None:
            entries, last_tokens = batch.last_token_entries, self.sampler.last_tokens
            fill_last_tokens(batch.tokens, batch.paging.query_starts, entries, last_tokens, num_rows)
        if self._drafter is None:
            return self.model(batch.tokens, batch.positions, batch.paging, self.cache.layers, ends)
        if may_have_drafts:
            self._drafter.fill_drafts(batch, num_rows)
        return self._drafter.run_target(self.model, batch, self.cache.layers, ends)

    def _run_captured(self, key: Key) -> Tensor:
        """The step that a graph captures, on the persistent buffers."""
        if key.kind == "decode" or key.kind in VERIFY_KINDS:
            is_decode, rows = key.kind == "decode", min(key.size, self.max_rows)
            batch = self.buffers.decode_batch(key.size)
            if not is_decode:
                batch = self.buffers.verify_batch(key.size, key.max_queries, has_trees=key.kind == "trees")
            if not key.depth:
                return self._forward(batch, rows, may_have_drafts=not is_decode)
            assert self._drafter is not None
            return self._drafter.draft(batch, self.sampler.tokens[: key.size], self.num_accepted, rows, key.depth)
        rows = self._max_rows_of(key.kind)
        batch = self.buffers.mixed_batch(key.size, rows, has_singles=key.kind != "prompts")
        return self._forward(batch, rows, self.buffers.ends_of(batch, rows))

    def accept(self, plan: Plan, output: SamplerOutput) -> None:
        """Find the accepted drafts of a step on the device, store the last tokens of their requests, and move side
        branches of trees to the front of their rows."""
        buffers, rows = self.buffers, self.buffers.listed_rows(plan)
        accept_drafts(
            rows, buffers.parents.view(len(output.tokens)), buffers.tokens.view(plan.num_tokens), output.tokens,
            output.max_logits, buffers.sample_entries.view(len(output.tokens)), self.sampler.last_tokens,
            self.num_accepted, self._accepted_paths,
        )  # fmt: skip
        if has_tree(plan):
            self._move_tokens(
                rows, self.num_accepted, self._accepted_paths, buffers.query_starts.view(len(plan) + 1),
                buffers.seq_lens.view(len(plan)),
                [table.buffer.view(len(plan), buffers.max_blocks) for table in buffers.tables],
            )  # fmt: skip

    def draft(self, step: GpuStep) -> None:
        """Run the drafter behind a step that was sampled: on its prompts, or to make drafts for the next step."""
        plan, drafter = step.plan, self._drafter
        if drafter is None:
            return
        if plan.drafted:
            assert step.key is not None
            drafter.compute_kept()
            self.graphs.run(step.key._replace(depth=max(plan.drafted.values())))
            return
        if plan.counts != plan.yields:
            assert step.batch is not None
            drafter.compute_kept()
            self._store_prompts(drafter, plan, step.batch)
        if plan.counts == plan.yields or plan.drafts:
            rows = self.buffers.listed_rows(plan) if plan.drafts else None
            drafter.keep(plan, rows, self.num_accepted, self._accepted_paths, self.sampler.last_tokens)

    def _store_prompts(self, drafter: GpuDrafter, plan: Plan, batch: Batch) -> None:
        """Store the head's keys of a step with prompts. The token after a prompt's last one is the sampled one."""
        buffers, num_rows, size = self.buffers, len(plan), len(batch.tokens)
        following = buffers.following.view(1 + size)
        stops, entries = buffers.query_starts.view(num_rows + 1)[1:], buffers.following_entries.view(num_rows)
        fill_last_tokens(following, stops, entries, self.sampler.last_tokens, num_rows)
        drafter.store(batch, following[1:])

    def _find_drafting(self, key: Key) -> list[Key]:
        """What may come behind a step: drafting, by its depth."""
        drafter, kinds = self._drafter, ("decode", VERIFY_KINDS[1] if self.ops.exact else VERIFY_KINDS[0])
        if drafter is None or key.kind not in kinds:
            return []
        return [key._replace(depth=depth) for depth in DEPTHS if depth <= drafter.max_depth]

    def _max_rows_of(self, kind: str) -> int:
        """Rows of a captured step with prompts."""
        return self.max_rows if kind == "crowded" else min(MIXED_ROWS, self.max_rows)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture the first graphs. This runs every kernel, so that no request waits for one to be compiled or
        loaded."""
        self.buffers.fill_padding(self.buffers.max_tokens, self.max_rows)
        kinds = ("mixed", "prompts", "crowded") if self.max_rows > MIXED_ROWS else ("mixed", "prompts")
        verify_kinds = VERIFY_KINDS if self._speculates else ()
        self.graphs.warm_up(kinds, VERIFY_KINDS[1:] if self.ops.exact and verify_kinds else verify_kinds, QUERIES)
        if self._drafter is not None:
            self._drafter.prepare()
        key = self.graphs.find("decode", 1)
        assert key is not None
        self.sampler.prepare(self.graphs.replay(key))

    def idle(self, seconds: float) -> bool:
        return self.graphs.capture_next(seconds)


def has_tree(plan: Plan) -> bool:
    return not all(drafts.is_chain for drafts in plan.drafts.values())
