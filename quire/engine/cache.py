"""The cache's tensors: where the blocks that `core/` hands out by number really are.

Layers that look equally far back form groups of equal size, each group with a block table of its own. A block is as
large as a group's layers need for `block_size` tokens, so blocks serve every group alike and one pool is enough.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.engine.memory import CacheSize
from quire.kernels.paging import LayerCache


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Which group each layer is in, and which of the block's slots is its own."""

    windows: tuple[int | None, ...]  # a group each
    places: tuple[tuple[int, int], ...]  # a layer each: (group, slot)
    num_slots: int


def lay_out(windows: Sequence[int | None]) -> CacheLayout:
    """Group layers by window, in groups as large as the rarest window's."""
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    num_slots = min(len(layers) for layers in kinds.values())
    groups: list[int | None] = []
    places = [(0, 0)] * len(windows)
    for window, layers in kinds.items():
        for start in range(0, len(layers), num_slots):
            for slot, layer in enumerate(layers[start : start + num_slots]):
                places[layer] = (len(groups), slot)
            groups.append(window)
    return CacheLayout(tuple(groups), tuple(places), num_slots)


class CacheTensors:
    """Keys and values of all blocks. Number 0 exists too: padded table entries point at it and nobody reads it."""

    def __init__(
        self,
        layout: CacheLayout,
        size: CacheSize,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (size.num_blocks + 1, size.block_size, num_kv_heads, head_dim)
        self._slots = [(zeros(shape, dtype, device), zeros(shape, dtype, device)) for _ in range(layout.num_slots)]
        self.layers = [LayerCache(*self._slots[slot], group) for group, slot in layout.places]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, in order: a source may be an earlier target."""
        for source, target in copies:
            for k, v in self._slots:
                k[target] = k[source]
                v[target] = v[source]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros; on a CPU, pages are mapped when they are first written, so unused ones cost nothing."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def block_bytes(layout: CacheLayout, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """What one block takes in memory."""
    return 2 * layout.num_slots * block_size * num_kv_heads * head_dim * dtype.itemsize
