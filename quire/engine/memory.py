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
# What a step takes is measured and set aside; the rest is for what is loaded later (kernels of sizes that come up for
# the first time) and for pieces of memory too small to be of use.
CUDA_SHARE = 0.95
# Captured graphs compute in memory of their own, which they share: never more than the largest step takes, so that is
# set aside a second time. The driver keeps a few MiB more for each graph; when this is used up, no more are captured.
GRAPH_BYTES = 256 << 20
SWAP_SHARE = 0.25  # of the host's free memory: pinned pages serve nobody else
MAX_SWAP_GIB = 8.0  # unless more is asked for
GIB = 1 << 30
SMALLER_WEIGHTS = "End other programs on the GPU, take a smaller model, or set device to 'cpu'."


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
class Room:
    """Bytes for the cache: how many it takes by itself, and the most that may be asked for.

    `kept` is what is set aside for a GPU's steps and their graphs.
    """

    share: int
    most: int
    kept: int = 0
    is_gpu: bool = False


def free_bytes(device: torch.device) -> int:
    """Memory that can still be taken on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_free_system_bytes(), _free_cgroup_bytes())


def describe_free(device: torch.device) -> str:
    """'3.10 GiB of its 139.81 GiB are free'"""
    free, total = torch.cuda.mem_get_info(device)
    return f"{readable(free)} of its {readable(total)} are free"


def check_weights(num_bytes: int, device: torch.device) -> None:
    """Refuse weights that a GPU has no room for before they are read."""
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()  # what an earlier engine of this process has left
    if num_bytes > free_bytes(device):
        raise NotEnoughMemory(
            f"The weights take {readable(num_bytes)}, more than the GPU has: {describe_free(device)}. {SMALLER_WEIGHTS}"
        )


def find_room(device: torch.device, step_bytes: int) -> Room:
    """For the cache, when the weights are loaded; `step_bytes` is what the largest step takes of a GPU."""
    free = free_bytes(device)
    if device.type != "cuda":
        return Room(int(CPU_SHARE * free), free)
    kept = 2 * step_bytes + GRAPH_BYTES
    return Room(max(0, int(CUDA_SHARE * free) - kept), max(0, free - kept), kept, is_gpu=True)


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
    room: Room,
) -> CacheSize:
    """Blocks as asked for, if they fit, or as many as fit; never more than all requests together could use.

    `num_fixed` is how many blocks a request has at most in groups that do not grow with it.
    """
    is_asked = num_blocks is not None or kv_memory is not None

    def needed(length: int) -> int:
        return peak_blocks(length, max_tokens_per_step, block_size, windows) + num_fixed

    if num_blocks is None:
        num_bytes = int(kv_memory * GIB) if kv_memory is not None else room.share
        num_blocks = num_bytes // block_bytes
        most_blocks = max_requests * needed(max_len)
    else:
        most_blocks = num_blocks
    if is_asked and num_blocks * block_bytes > room.most:
        raise NotEnoughMemory(
            f"A cache of {readable(num_blocks * block_bytes)} ({num_blocks:,} blocks) was asked for, but "
            f"{describe_room(room)}"
        )
    num_blocks = min(num_blocks, most_blocks)
    longest = bisect_right(range(1, max_len + 1), num_blocks, key=needed)
    if longest < max(1, max_len_wanted or 1):
        is_full = room.is_gpu and not is_asked
        remedy = "End other programs on the GPU, take a smaller model" if is_full else "Raise kv_memory or num_blocks"
        raise NotEnoughMemory(
            f"The cache has {num_blocks} blocks ({readable(num_blocks * block_bytes)}), enough for {longest:,} tokens, "
            f"but a request may have {max_len_wanted or 1:,}. {remedy}, or lower max_len."
        )
    return CacheSize(num_blocks, block_size, block_bytes, longest, needed(longest))


def describe_room(room: Room) -> str:
    """What is free, and what to do about it, as the end of a sentence."""
    if room.is_gpu:
        return (
            f"beside the weights and what steps need the GPU has {readable(room.most)} free. Lower kv_memory or "
            "num_blocks, or for smaller steps max_tokens_per_step or max_requests."
        )
    return f"beside the weights the machine has {readable(room.most)} free. Lower kv_memory or num_blocks."


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
    """One line: what is loaded, what computes it, what steps and the cache take, and for how many requests."""
    steps = f"steps and graphs up to {readable(step_bytes)}, " if step_bytes else ""
    num_longest = min(max_requests, cache.num_blocks // cache.blocks_per_request)
    return (
        f"{model} ({family}), {ops}: weights {readable(weight_bytes)}, {steps}{kv_dtype} cache up to "
        f"{readable(cache.nbytes)} in {cache.num_blocks:,} blocks of {cache.block_size} tokens; "
        f"longest request {cache.max_len:,} tokens; {max_requests:,} requests at once, {num_longest:,} of the longest"
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
