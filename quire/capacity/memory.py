"""Memory of an engine, as plain formulas: what it takes before and during requests, and which requests fit.

`plan.py` prints them. `engine/memory.py` decides sizes when an engine starts; the formulas of blocks are those of the
scheduler (`core/kv_cache.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from quire.capacity.model_size import ModelSize
from quire.capacity.profile import EngineSizes
from quire.core.kv_cache import peak_blocks

BOOKKEEPING_BYTES = 56  # of host memory for each block: the pool's lists and free list
GPU_CONTEXT_BYTES = 500 << 20  # what a process takes on a GPU before it allocates anything
GRAPH_BYTES = 256 << 20  # reserved for captured graphs, as `engine/memory.py` does
LOGIT_COPIES = 3  # of a row of logits on a GPU: logits, their log softmax, and what that needs


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one engine."""

    weights: int
    tables: int
    activations: int
    process: int  # interpreter, libraries and what is allocated once
    cache: int  # if every block is used

    @property
    def idle(self) -> int:
        """Before any request."""
        return self.weights + self.tables + self.activations + self.process

    @property
    def most(self) -> int:
        return self.idle + self.cache


def kv_bytes_per_token(size: ModelSize) -> float:
    """block_bytes / block_size, once for each cache group."""
    return size.key_bytes * len(size.windows)


def request_blocks(size: ModelSize, length: int, max_tokens_per_step: int) -> int:
    """The most blocks of a request of `length` tokens: ceil(length / block_size) a group. A group with a window holds
    at most ceil((window - 1 + max_tokens_per_step) / block_size) + 1. States and encoders are added."""
    return peak_blocks(length, max_tokens_per_step, size.block_size, size.windows) + size.num_fixed_blocks


def request_bytes(size: ModelSize, length: int, max_tokens_per_step: int) -> int:
    """block_bytes x request_blocks."""
    return size.block_bytes * request_blocks(size, length, max_tokens_per_step)


def activation_bytes(size: ModelSize, max_tokens_per_step: int, max_requests: int, *, is_gpu: bool = False) -> int:
    """row_bytes x tokens of the largest step, and 4 x vocabulary x requests for logits (3 times on a GPU)."""
    logits = 4 * size.vocab_size * max_requests * (LOGIT_COPIES if is_gpu else 1)
    return size.row_bytes * max_tokens_per_step + logits


def engine_memory(size: ModelSize, sizes: EngineSizes, process_bytes: int, *, is_gpu: bool = False) -> Memory:
    """Everything that an engine with these sizes takes."""
    return Memory(
        weights=size.weight_bytes,
        tables=size.table_bytes,
        activations=activation_bytes(size, sizes.max_tokens_per_step, sizes.max_requests, is_gpu=is_gpu),
        process=process_bytes + (0 if is_gpu else BOOKKEEPING_BYTES * sizes.num_blocks),
        cache=size.block_bytes * sizes.num_blocks,
    )


def gpu_blocks(size: ModelSize, memory_bytes: int, max_tokens_per_step: int, max_requests: int, share: float) -> int:
    """Blocks on a GPU: (share x (memory - context - weights - tables) - 2 x activations - graphs) / block_bytes."""
    free = memory_bytes - GPU_CONTEXT_BYTES - size.weight_bytes - size.table_bytes
    step = activation_bytes(size, max_tokens_per_step, max_requests, is_gpu=True)
    return max(0, int(share * free - 2 * step - GRAPH_BYTES) // size.block_bytes)


def longest_request(size: ModelSize, num_blocks: int, max_tokens_per_step: int) -> int:
    """The longest request whose blocks fit, at most the model's own limit."""
    lengths = range(1, size.max_len + 1)
    return bisect_right(lengths, num_blocks, key=lambda length: request_blocks(size, length, max_tokens_per_step))


def requests_that_fit(size: ModelSize, sizes: EngineSizes, length: int) -> int:
    """num_blocks / request_blocks, at most max_requests."""
    return min(sizes.max_requests, sizes.num_blocks // request_blocks(size, length, sizes.max_tokens_per_step))
