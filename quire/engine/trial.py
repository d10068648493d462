"""The largest step there can be, computed once before the cache is made: what it takes of a GPU is measured.

It also has every kernel of a step compiled, so a GPU that cannot run one is found out at start and not by a request.
`engine.py` calls `measure_step`; a CPU is never asked.
"""

from __future__ import annotations

import torch

from quire.core.plan import Plan
from quire.core.request import Request
from quire.engine.batch import BatchBuffers
from quire.engine.cache import BlockShape, CacheLayout, CacheTensors
from quire.engine.faults import kernels_tried, told_clearly
from quire.engine.memory import CacheSize
from quire.kernels import Kernels
from quire.models.decoder import Decoder

ONLY_BLOCK = 1  # all tokens of the trial are written to it, over each other: nobody looks at what comes out


def measure_step(
    model: Decoder,
    ops: Kernels,
    layout: CacheLayout,
    block: BlockShape,
    max_tokens: int,
    max_requests: int,
    max_len: int,
    block_size: int,
) -> int:
    """Bytes that a step takes at its peak beside weights and cache, as torch asks the GPU for them.

    That is more than what it uses of them: pieces too small to be of use are lost to the real steps too.
    """
    what = f"a step of {max_tokens:,} tokens for {max_requests:,} requests beside the weights"
    remedy = "Lower max_tokens_per_step or max_requests, or take a smaller model."
    num_groups = len(layout.windows)
    with told_clearly(what, remedy, ops.device), kernels_tried(ops):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(ops.device)
        before = torch.cuda.memory_reserved(ops.device)
        buffers = BatchBuffers(max_tokens, max_requests, max_len, num_groups, block_size, ops.device)
        cache = CacheTensors(layout, CacheSize(ONLY_BLOCK, block_size, 0, max_len, 1), block, ops.device)
        run_step(model, largest_plan(max_tokens, max_requests, max_len, block_size, num_groups), buffers, cache)
        torch.cuda.synchronize(ops.device)
        taken = torch.cuda.max_memory_reserved(ops.device) - before
    del buffers, cache
    torch.cuda.empty_cache()
    return int(taken)


@torch.inference_mode()
def run_step(model: Decoder, plan: Plan, buffers: BatchBuffers, cache: CacheTensors) -> None:
    """The model on all tokens, and the logits of every row twice: as if each asked for log probabilities."""
    batch = buffers.fill(plan)
    hidden = model(batch.tokens, batch.positions, batch.paging, cache.layers)
    ends = torch.tensor(batch.paging.host_query_starts[1:], device=hidden.device) - 1
    torch.log_softmax(model.logits(hidden[ends]), -1)


def largest_plan(max_tokens: int, max_requests: int, max_len: int, block_size: int, num_groups: int) -> Plan:
    """As many rows as there may be, and as many tokens: long prompts first, then rows of one token."""
    plan, left = Plan(0), max_tokens
    for num_after in reversed(range(max_requests)):
        count = min(max_len, left - num_after)
        request = Request(f"trial {num_after}", [0] * count)
        request.tables = [[ONLY_BLOCK] * -(-count // block_size) for _ in range(num_groups)]
        plan.requests.append(request)
        plan.starts.append(0)
        plan.counts.append(count)
        plan.yields.append(1)
        left -= count
    return plan
