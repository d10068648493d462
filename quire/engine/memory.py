"""How much memory is free, how many cache blocks fit into it, and the summary line that is logged at start."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.core.kv_cache import peak_blocks
from quire.errors import NotEnoughMemory
from quire.kernels.arrays import ITEM_BYTES
from quire.models.config import ModelConfig

CPU_SHARE = 0.25  # of free memory; the rest is for other programs
# The memory of a step is measured and reserved. The rest is for kernels that are loaded later and for fragmentation.
CUDA_SHARE = 0.95
# Captured graphs share a memory pool of their own. It is never larger than the largest step, so that is reserved twice.
# The driver takes a few MiB for each graph. When GRAPH_BYTES are used up, no more graphs are captured.
GRAPH_BYTES = 256 << 20
SWAP_SHARE = 0.25  # of the host's free memory: other programs cannot use pinned pages
MAX_SWAP_GIB = 8.0  # if swap_memory is not set
GIB = 1 << 30
WEIGHTS_REMEDY = "End other programs on the GPU, take a smaller model, or set device to 'cpu'."


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The cache's size, the longest request it can hold, and how many blocks that one needs."""

    num_blocks: int
    block_size: int
    block_bytes: int
    max_len: int
    blocks_per_request: int

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.block_bytes


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes for the cache: the default, and the most that may be configured.

    `reserved_bytes` are for a GPU's steps and graphs.
    """

    default_bytes: int
    max_bytes: int
    reserved_bytes: int = 0
    is_gpu: bool = False

    def without(self, num_bytes: int) -> MemoryBudget:
        """What is left on a CPU when so much more has been allocated, for engines that are not built."""
        most = max(0, self.max_bytes - num_bytes)
        return MemoryBudget(int(CPU_SHARE * most), most)


def free_bytes(device: str) -> int:
    """Free memory of a device."""
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    return min(_free_system_bytes(), _free_cgroup_bytes())


def describe_gpu_memory() -> str:
    """'3.10 GiB of its 139.81 GiB are free'"""
    import torch

    free, total = torch.cuda.mem_get_info()
    return f"{readable(free)} of its {readable(total)} are free"


def check_weights(num_bytes: int, device: str) -> None:
    """Raise NotEnoughMemory for weights that do not fit into a GPU, before they are read."""
    if device != "cuda":
        return
    import torch

    torch.cuda.empty_cache()  # torch may still cache memory of an earlier engine of this process
    if num_bytes > free_bytes(device):
        raise NotEnoughMemory(
            f"The weights take {readable(num_bytes)}, more than the GPU has: {describe_gpu_memory()}. {WEIGHTS_REMEDY}"
        )


def check_tables(model: ModelConfig, device: str) -> None:
    """Raise NotEnoughMemory for tables of positions that do not fit. A file may claim any length."""
    num_bytes = sum(ITEM_BYTES["float32"] * model.max_len * rope.dim for rope in (model.rope, model.local_rope) if rope)
    free = free_bytes(device)
    if num_bytes > free // 2:
        raise NotEnoughMemory(
            f"A context of {model.max_len:,} tokens needs tables of {readable(num_bytes)}, and {readable(free)} are "
            "free. Lower max_len (--max-len)."
        )


def find_memory_budget(device: str, step_bytes: int, kept_bytes: int = 0) -> MemoryBudget:
    """Called when the weights are loaded. `step_bytes` is the peak memory of the largest step on a GPU, and
    `kept_bytes` what is allocated there after this call and kept."""
    free = free_bytes(device)
    if device != "cuda":
        return MemoryBudget(int(CPU_SHARE * free), free)
    reserved = 2 * step_bytes + GRAPH_BYTES + kept_bytes
    return MemoryBudget(max(0, int(CUDA_SHARE * free) - reserved), max(0, free - reserved), reserved, is_gpu=True)


def size_cache(
    *,
    block_bytes: int,
    block_size: int,
    windows: Sequence[int | None],
    num_fixed: int = 0,
    max_tokens_per_step: int,
    num_blocks: int | None,
    kv_memory: float | None,
    max_len: int,
    max_len_wanted: int | None,
    max_requests: int,
    budget: MemoryBudget,
) -> CacheSize:
    """`num_blocks` if it is set. Otherwise as many as fit, up to what `max_requests` of the longest requests use.

    `num_fixed` is the most blocks that a request has in groups that do not grow with it.
    """
    is_configured = num_blocks is not None or kv_memory is not None

    def needed(length: int) -> int:
        return peak_blocks(length, max_tokens_per_step, block_size, windows) + num_fixed

    if num_blocks is None:
        num_bytes = int(kv_memory * GIB) if kv_memory is not None else budget.default_bytes
        num_blocks = num_bytes // block_bytes
        max_blocks = max_requests * needed(max_len)
    else:
        max_blocks = num_blocks
    if is_configured and num_blocks * block_bytes > budget.max_bytes:
        raise NotEnoughMemory(
            f"A cache of {readable(num_blocks * block_bytes)} ({num_blocks:,} blocks) was asked for, but "
            f"{describe_budget(budget)}"
        )
    num_blocks = min(num_blocks, max_blocks)
    longest = bisect_right(range(1, max_len + 1), num_blocks, key=needed)
    if longest < max(1, max_len_wanted or 1):
        is_full = budget.is_gpu and not is_configured
        remedy = "End other programs on the GPU, take a smaller model" if is_full else "Raise kv_memory or num_blocks"
        raise NotEnoughMemory(
            f"The cache has {num_blocks} blocks ({readable(num_blocks * block_bytes)}), enough for {longest:,} tokens, "
            f"but a request may have {max_len_wanted or 1:,}. {remedy}, or lower max_len."
        )
    return CacheSize(num_blocks, block_size, block_bytes, longest, needed(longest))


def describe_budget(budget: MemoryBudget) -> str:
    """Free memory and what to change, as the end of a sentence."""
    if budget.is_gpu:
        return (
            f"beside the weights and what steps need the GPU has {readable(budget.max_bytes)} free. Lower kv_memory or "
            "num_blocks, or for smaller steps max_tokens_per_step or max_requests."
        )
    return f"beside the weights the machine has {readable(budget.max_bytes)} free. Lower kv_memory or num_blocks."


def size_swap(swap_memory: float | None, block_bytes: int, device: str) -> int:
    """The number of host blocks for preempted requests. The default on a CPU is 0: its cache is in host memory."""
    if swap_memory == 0 or (swap_memory is None and device != "cuda"):
        return 0
    free = free_bytes("cpu")
    if swap_memory is None:
        return int(min(MAX_SWAP_GIB * GIB, SWAP_SHARE * free)) // block_bytes
    if swap_memory * GIB > free:
        raise NotEnoughMemory(
            f"swap_memory is {swap_memory:g} GiB, but the host has {readable(free)} free. Lower it, or give 0 to have "
            "preempted requests computed again."
        )
    if swap_memory * GIB < block_bytes:
        raise NotEnoughMemory(
            f"swap_memory is {swap_memory:g} GiB, less than one block of the cache takes ({readable(block_bytes)}). "
            "Raise it, or give 0 to have preempted requests computed again."
        )
    return int(swap_memory * GIB) // block_bytes


def describe(
    model: str,
    family: str,
    ops: str,
    weight_bytes: int,
    step_bytes: int,
    cache: CacheSize,
    kv_dtype: str,
    max_requests: int,
) -> str:
    """One line: the model, its kernels, the memory of steps and cache, and the number of requests."""
    steps = f"steps and graphs up to {readable(step_bytes)}, " if step_bytes else ""
    num_longest = min(max_requests, cache.num_blocks // cache.blocks_per_request)
    return (
        f"{model} ({family}), {ops}: weights {readable(weight_bytes)}, {steps}{kv_dtype} cache up to "
        f"{readable(cache.nbytes)} in {cache.num_blocks:,} blocks of {cache.block_size} tokens; "
        f"longest request {cache.max_len:,} tokens; {max_requests:,} requests at once, {num_longest:,} of the longest"
    )


CACHE_SCALES = re.compile(r".*\.[kv]_scale|.*\.[kv]_proj\.output_scale")


def note_cache_scales(unused: Sequence[str], kv_dtype: str, *, native: bool) -> str:
    """What becomes of a checkpoint's scales of keys and values; empty if it has none."""
    count = sum(bool(CACHE_SCALES.fullmatch(name)) for name in unused)
    if not count:
        return ""
    if kv_dtype not in ("int8", "fp8"):
        why = f"a {kv_dtype} cache needs none"
    else:
        why = "this cache has a scale for each token and head" if native else "this cache has no scales"
    return f"; the file's {count:,} scales of keys and values are not used: {why}"


def readable(num_bytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"


def _free_system_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _free_cgroup_bytes() -> int:
    """Free memory below a container's limit. Without a limit, a number above any memory."""
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        return max(0, int(text) - int(used.read_text()))
    return 1 << 62
