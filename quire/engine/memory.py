"""How much memory there is, how many cache blocks it gives, and the line that says so at start."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.errors import NotEnoughMemory

CPU_SHARE = 0.25  # of what is free: a laptop has other things to do
CUDA_SHARE = 0.90
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The cache's size, and the longest request it can hold."""

    num_blocks: int
    block_size: int
    block_bytes: int
    max_len: int
    num_groups: int = 1

    @property
    def num_tokens(self) -> int:
        return self.num_blocks // self.num_groups * self.block_size

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
    num_groups: int,
    num_blocks: int | None,
    kv_memory: float | None,
    max_len: int,
    max_len_wanted: int | None,
    max_requests: int,
    device: torch.device,
) -> CacheSize:
    """Blocks as asked for, or as many as fit; never more than all requests together could use."""
    per_request = num_groups * -(-max_len // block_size)
    if num_blocks is None:
        share = CUDA_SHARE if device.type == "cuda" else CPU_SHARE
        room = int(kv_memory * GIB) if kv_memory is not None else int(share * free_bytes(device))
        num_blocks = min(room // block_bytes, max_requests * per_request)
    fitting = num_blocks // num_groups * block_size
    if fitting < block_size or (max_len_wanted is not None and fitting < max_len_wanted):
        wanted = max_len_wanted or block_size
        raise NotEnoughMemory(
            f"The cache has room for {fitting:,} tokens ({num_blocks} blocks, {readable(num_blocks * block_bytes)}), "
            f"but a request may have {wanted:,}. Raise kv_memory or num_blocks, or lower max_len."
        )
    return CacheSize(num_blocks, block_size, block_bytes, min(max_len, fitting), num_groups)


def describe(model: str, family: str, dtype: torch.dtype, weight_bytes: int, cache: CacheSize, device: str) -> str:
    """One line: what is loaded, what the cache holds."""
    most = cache.num_tokens // cache.max_len
    return (
        f"{model} ({family}, {str(dtype).removeprefix('torch.')}) on {device}: weights {readable(weight_bytes)}, "
        f"cache up to {readable(cache.nbytes)} = {cache.num_blocks:,} blocks of {cache.block_size} = "
        f"{cache.num_tokens:,} tokens; longest request {cache.max_len:,} tokens, {most} of those at once"
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
