"""ProfileRun: runs the largest step once on a GPU, before the cache is allocated, and measures its peak memory.

It also finds kernels that the GPU cannot run before the first request. `build.py` calls this for a GPU.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from threading import Thread

import torch

from quire.core.plan import Plan
from quire.core.request import Request
from quire.engine.batch import Batch, BatchBuffers, BufferShape
from quire.engine.cache import CacheLayout, CacheTensors
from quire.engine.faults import explain_kernel_errors, explain_out_of_memory
from quire.engine.memory import CacheSize
from quire.kernels import Kernels
from quire.kernels.torch_arrays import torch_type
from quire.models.decoder import Decoder

ONLY_BLOCK = 1  # all tokens are written to this block; the results are not used


@dataclass(frozen=True, slots=True)
class ProfileRun:
    """A model without a cache, and the largest size of its steps."""

    model: Decoder
    ops: Kernels
    layout: CacheLayout
    max_tokens: int
    max_requests: int
    max_len: int
    block_size: int

    def measure(self, libraries: Thread) -> int:
        """The peak of reserved bytes in the largest step, without weights and cache.

        Reserved memory includes fragmentation, which real steps have too.
        """
        what = f"a step of {self.max_tokens:,} tokens for {self.max_requests:,} requests beside the weights"
        remedy = "Lower max_tokens_per_step or max_requests, or take a smaller model."
        device = self.ops.device
        with explain_out_of_memory(what, remedy, device), explain_kernel_errors(self.ops):
            libraries.join()
            self._run(1, 1)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_reserved()
            self._run(self.max_tokens, self.max_requests)
            taken = torch.cuda.max_memory_reserved() - before
        torch.cuda.empty_cache()
        return int(taken)

    def _run(self, num_tokens: int, num_requests: int) -> None:
        batch, cache = self._lay_out(num_tokens, num_requests)
        run_step(self.model, batch, cache)
        torch.cuda.synchronize()

    def _lay_out(self, num_tokens: int, num_requests: int) -> tuple[Batch, CacheTensors]:
        windows, max_len, arrays = self.layout.windows, self.max_len, self.ops.arrays
        vocab_size = self.model.head.weight.shape[0]
        num_fixed = self.layout.num_fixed_groups
        shape = BufferShape(num_tokens, num_requests, max_len, windows, self.block_size, vocab_size, arrays, num_fixed)
        size = CacheSize(ONLY_BLOCK, self.block_size, 0, max_len, 1)
        plan = largest_plan(num_tokens, num_requests, max_len, self.block_size, len(windows), num_fixed)
        return BatchBuffers(shape).fill(plan), CacheTensors(self.layout, size, arrays)


def read_libraries(device: str, dtype: str) -> Thread:
    """Load cuBLAS, which is a large file, in a thread while weights are loaded and kernels are compiled."""
    thread = Thread(target=_load_libraries, args=(device, dtype), name="libraries", daemon=True)
    thread.start()
    return thread


def _load_libraries(device: str, dtype: str) -> None:
    with suppress(RuntimeError):  # the same error is raised again where the library is needed
        x = torch.zeros(64, 64, dtype=torch_type(dtype), device=device)
        torch.mm(x, x)
        torch.cuda.synchronize()


@torch.inference_mode()
def run_step(model: Decoder, batch: Batch, cache: CacheTensors) -> None:
    """The model on all tokens, and logits and log probabilities of every row."""
    layers = cache.layers[: len(model.layers)]  # the others are those of a draft head
    hidden = model(batch.tokens, batch.positions, batch.paging, layers)
    ends = torch.tensor(batch.paging.host_query_starts[1:], device=hidden.device) - 1
    torch.log_softmax(model.head(hidden[ends]), -1)


def largest_plan(
    max_tokens: int, max_requests: int, max_len: int, block_size: int, num_groups: int, num_fixed_groups: int = 0
) -> Plan:
    """A plan with the most rows and tokens: long prompts first, then rows of one token."""
    plan, left = Plan(0), max_tokens
    for num_after in reversed(range(max_requests)):
        count = min(max_len, left - num_after)
        request = Request(f"profile {num_after}", [0] * count)
        request.tables = [[ONLY_BLOCK] * -(-count // block_size) for _ in range(num_groups)]
        request.fixed_tables = [[ONLY_BLOCK] for _ in range(num_fixed_groups)]
        plan.requests.append(request)
        plan.starts.append(0)
        plan.counts.append(count)
        plan.yields.append(1)
        left -= count
    return plan
