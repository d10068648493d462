"""How much memory there is, how many cache blocks it gives, and the line that says so at start."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.core.kv_cache import peak_blocks
from quire.errors import NotEnoughMemory

CPU_SHARE = 0.25  # of what is free: a laptop has other things to do
CUDA_SHARE = 0.90
SWAP_SHARE = 0.25  # of the host's free memory: pinned pages serve nobody else
MAX_SWAP_GIB = 8.0  # unless more is asked for
GIB = 1 << 30


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


def free_bytes(device: torch.device) -> int:
    """Memory that can still be taken on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_free_system_bytes(), _free_cgroup_bytes())


def size_cache(
    *,
    block_bytes: int,
    block_size: int,
    windows: Sequence[int | None],
    max_tokens_per_step: int,
    num_blocks: int | None,
    kv_memory: float | None,
    max_len: int,
    max_len_wanted: int | None,
    max_requests: int,
    device: torch.device,
) -> CacheSize:
    """Blocks as asked for, or as many as fit; never more than all requests together could use."""

    def needed(length: int) -> int:
        return peak_blocks(length, max_tokens_per_step, block_size, windows)

    if num_blocks is None:
        share = CUDA_SHARE if device.type == "cuda" else CPU_SHARE
        room = int(kv_memory * GIB) if kv_memory is not None else int(share * free_bytes(device))
        num_blocks = min(room // block_bytes, max_requests * needed(max_len))
    longest = bisect_right(range(1, max_len + 1), num_blocks, key=needed)
    if longest < max(1, max_len_wanted or 1):
        raise NotEnoughMemory(
            f"The cache has {num_blocks} blocks ({readable(num_blocks * block_bytes)}), enough for {longest:,} tokens, "
            f"but a request may have {max_len_wanted or 1:,}. Raise kv_memory or num_blocks, or lower max_len."
        )
    return CacheSize(num_blocks, block_size, block_bytes, longest, needed(longest))


def size_swap(swap_memory: float | None, block_bytes: int, device: torch.device) -> int:
    """Blocks of preempted requests that the host may hold. A CPU's cache is there already: none unless asked for."""
    if swap_memory == 0 or (swap_memory is None and device.type != "cuda"):
        return 0
    free = free_bytes(torch.device("cpu"))
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


def describe(model: str, family: str, ops: str, weight_bytes: int, cache: CacheSize, kv_dtype: str) -> str:
    """One line: what is loaded, what computes it, what the cache holds."""
    return (
        f"{model} ({family}), {ops}: weights {readable(weight_bytes)}, {kv_dtype} cache up to "
        f"{readable(cache.nbytes)} in {cache.num_blocks:,} blocks of {cache.block_size} tokens; "
        f"longest request {cache.max_len:,} tokens, {cache.num_blocks // cache.blocks_per_request} of those at once"
    )


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
    """What a container's limit leaves; without one, as good as endless."""
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        return max(0, int(text) - int(used.read_text()))
    return 1 << 62
