"""The cache's tensors: where the blocks that `core/` hands out by number really are.

Layers that look equally far back form groups of equal size, each group with a block table of its own. A block is as
large as a group's layers need for `block_size` tokens, so blocks serve every group alike and one pool is enough.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.engine.host_blocks import HostBlocks
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


class BlockShape(NamedTuple):
    """What one layer keeps for a block of tokens: the answer of the `cache_shapes` op."""

    k: tuple[int, ...]
    v: tuple[int, ...]
    dtype: torch.dtype


class CacheTensors:
    """Keys and values of all blocks. Number 0 exists too: padded table entries point at it and nobody reads it."""

    def __init__(
        self, layout: CacheLayout, size: CacheSize, block: BlockShape, device: torch.device, swap_slots: int = 0
    ) -> None:
        count = size.num_blocks + 1
        k, v = (zeros((layout.num_slots, count, *shape), block.dtype, device) for shape in block[:2])
        self._parts = k, v
        self.layers = [LayerCache(k[slot], v[slot], group, size.block_size) for group, slot in layout.places]
        self.host = HostBlocks(self._parts, swap_slots)

    def swap_blocks(self, swap_out: Sequence[tuple[int, int]], swap_in: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks to the host, each (block, slot), and then from there, each (slot, block)."""
        if swap_out:
            self.host.save(swap_out)
        if swap_in:
            self.host.load(swap_in)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, in order: a source may be an earlier target."""
        for source, target in copies:
            for part in self._parts:
                part[:, target] = part[:, source]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros; on a CPU, pages are mapped when they are first written, so unused ones cost nothing."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def block_bytes(layout: CacheLayout, block: BlockShape) -> int:
    """What one block takes in memory, over all layers of a group."""
    return layout.num_slots * (math.prod(block.k) + math.prod(block.v)) * block.dtype.itemsize
