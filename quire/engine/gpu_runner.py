"""GpuRunner: runs plans on a GPU without waiting for them, so that the next one is planned meanwhile.

Sampled tokens stay on the device, where the next step finds them; the host reads them one step late. Steps that only
decode, and the layers of mixed steps that are not large, are captured as CUDA graphs, one for each size that traffic
has needed; all others are launched op by op.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.core.plan import Plan, Sampled
from quire.core.request import Request
from quire.engine.batch import Batch
from quire.engine.cache import CacheTensors
from quire.engine.gpu_batch import GpuBuffers
from quire.engine.runner import ModelRunner, Pending
from quire.kernels import Kernels
from quire.kernels.cuda.best import BestFinder
from quire.kernels.cuda.feed import feed
from quire.kernels.cuda.sample import Draws, TokenSampler
from quire.kernels.paging import Ends
from quire.models.decoder import Decoder

DEPTH = 2  # plans launched before the first is taken in
MIXED_SIZES = (32, 64, 128, 256, 384, 512, 768, 1024)  # tokens; larger steps keep the host ahead anyway


def bucket_of(num_rows: int, most: int) -> int:
    """The size of the graph for so many rows: powers of two, from 16 on multiples of 16, from 128 on of 32."""
    if num_rows <= 16:
        size = 1 << (num_rows - 1).bit_length()
    elif num_rows <= 128:
        size = -(-num_rows // 16) * 16
    else:
        size = -(-num_rows // 32) * 32
    return min(size, most)


def needs_no_host(request: Request) -> bool:
    """Whether a request's next token can be chosen before its last one is known here."""
    return request.takes_logits and request.params.prompt_logprobs is None and not request.drafts


@dataclass(slots=True)
class Landing:
    """Where a step's tokens and their scores arrive on the host, and the event that says they have."""

    tokens: Tensor
    scores: Tensor
    event: torch.cuda.Event


class GpuRunner(ModelRunner):
    """A ModelRunner that works ahead of what the host has read, unless sampling needs to know it."""

    buffers: GpuBuffers

    def __init__(self, model: Decoder, cache: CacheTensors, buffers: GpuBuffers, ops: Kernels) -> None:
        super().__init__(model, cache, buffers, ops)
        device, max_rows = ops.device, buffers.max_rows
        self.max_rows = max_rows
        self._tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)  # the last step's, by row
        self._scores = torch.zeros(max_rows, dtype=torch.float32, device=device)
        self._landings = deque(
            Landing(
                torch.zeros(max_rows, dtype=torch.int64, pin_memory=True),
                torch.zeros(max_rows, dtype=torch.float32, pin_memory=True),
                torch.cuda.Event(),  # type: ignore[no-untyped-call]
            )
            for _ in range(DEPTH + 1)
        )
        self._find_best = BestFinder(max_rows, device)
        self._draw = TokenSampler(max_rows, model.head.weight.shape[0], model.head.softcap, device)
        self._rows: dict[str, int] = {}  # of the last plan
        self.depth = DEPTH
        self._graphs: dict[tuple[str, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Pending:
        """Start a step. What comes back waits for it."""
        self.cache.swap_blocks(plan.swap_out, plan.swap_in)
        self.cache.copy_blocks(plan.copies)
        self.depth = DEPTH if all(map(needs_no_host, plan.requests)) else 1
        if self.depth == 1:
            return self._launch_and_wait(plan)
        if plan.num_tokens == len(plan):
            self._run_decode(plan)
        else:
            self._run_mixed(plan)
        self._remember(plan)
        landing = self._send_home(len(plan))
        return lambda: self._arrive(plan, landing)

    def _launch_and_wait(self, plan: Plan) -> Pending:
        """Steps whose sampling needs the host: computed here and now."""
        batch = self.buffers.fill(plan, self._rows)
        self._feed(batch, len(plan))
        sampled = self._finish(plan, batch)
        tokens = [taken[-1] if taken else 0 for taken in sampled.tokens]
        self._tokens[: len(plan)] = torch.tensor(tokens, dtype=torch.int64).to(self.ops.device)
        self._remember(plan)
        return lambda: sampled

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

    def _send_home(self, num_rows: int) -> Landing:
        landing = self._landings[0]
        self._landings.rotate(-1)
        landing.tokens[:num_rows].copy_(self._tokens[:num_rows], non_blocking=True)
        landing.scores[:num_rows].copy_(self._scores[:num_rows], non_blocking=True)
        landing.event.record()
        return landing

    def _arrive(self, plan: Plan, landing: Landing) -> Sampled:
        landing.event.synchronize()
        tokens, scores = landing.tokens[: len(plan)].tolist(), landing.scores[: len(plan)].tolist()
        sampled = Sampled([[] for _ in range(len(plan))])
        for row, num_yields in enumerate(plan.yields):
            if num_yields:
                self._accept(plan, sampled, row, tokens[row] if math.isfinite(scores[row]) else None, None)
        return sampled

    def _run_decode(self, plan: Plan) -> None:
        """Rows of one token each, from the feeding of tokens to the choosing of the next ones.

        The choice of the likeliest is captured with the rest. Draws are launched after it: what they take differs, and
        the logits of every size would be kept with its graph.
        """
        size = bucket_of(len(plan), self.max_rows)
        batch = self.buffers.fill_decode(plan, self._rows, size)
        draws = self.buffers.fill_draws(plan)

        def body() -> Tensor:
            hidden = self._forward(batch, size)
            if draws is None:
                self._choose(hidden, None, batch.paging.seq_lens)
            return hidden

        hidden = self._replay(("decode" if draws is None else "layers", size), body)
        if draws is not None:
            self._choose(hidden, draws, batch.paging.seq_lens)

    def _run_mixed(self, plan: Plan) -> None:
        """Chunks of prompts, and single tokens among them."""
        size = min(next((size for size in MIXED_SIZES if size >= plan.num_tokens), 0), self.buffers.max_tokens)
        captured = self.buffers.fill_mixed(plan, self._rows, size) if size else None
        batch = captured if captured is not None else self.buffers.fill(plan, self._rows)
        draws = self.buffers.fill_draws(plan)
        if captured is not None:
            key = "mixed" if 1 in plan.counts else "prompts", size
            hidden = self._replay(key, lambda: self._forward(captured, self.max_rows))
            ends = batch.paging.query_starts[1 : len(plan) + 1].long() - 1
            hidden = hidden[ends]
        else:
            hidden = self._forward(batch, len(plan), batch.paging.ends())
        self._choose(hidden, draws, batch.paging.seq_lens)

    def _forward(self, batch: Batch, num_rows: int, ends: Ends | None = None) -> Tensor:
        self._feed(batch, num_rows)
        return self.model(batch.tokens, batch.positions, batch.paging, self.cache.layers, ends)

    def _replay(self, key: tuple[str, int], body: Callable[[], Tensor]) -> Tensor:
        """What `body` computes, captured when it is first needed: its buffers stay where they are."""
        if key not in self._graphs:
            self._graphs[key] = self._capture(body)
        graph, result = self._graphs[key]
        graph.replay()
        return result

    def _capture(self, body: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Run it once, so that every kernel is compiled and every buffer is there, and once more to be recorded."""
        before = self._tokens.clone()
        body()
        self._tokens.copy_(before)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = body()
        return graph, result
