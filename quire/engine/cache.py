"""The cache's memory: where the blocks that `core/` hands out by number really are.

Layers declare what they keep (`kernels/cache_spec.py`). Those that keep the same tokens form groups: all that grow with
the request and look equally far back, all that hold the encoder's tokens, all states. A group has a block table of its
own, and its block holds what all of its layers keep of `block_size` tokens, whatever their shapes and types. Blocks of
all groups are equally large, so one pool serves them all.

Two groups of equal layers, and how block 7 lies in memory if layers differ between groups:

    planes   keys of slot 0    [block 0][block 1] ...     group 0: layers 0 and 1, group 1: layers 2 and 3
             keys of slot 1    [block 0][block 1] ...     layers 0 and 2 share slot 0: their block ids never meet
             values of slot 0  ...
    packed   [block 0][block 1] ... [ block 7: k0 v0 k1 v1 padding, or k2 v2 padding ] ...
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from quire.engine.host_blocks import HostBlocks
from quire.engine.memory import CacheSize
from quire.kernels import Kernels
from quire.kernels.cache_spec import BlockShape, CacheSpec, KVCacheSpec, StateSpec
from quire.kernels.paging import LayerCache

ALIGNMENT = 256  # bytes, of each layer's part where blocks are packed: whole rows of every kernel's tiles
MAX_PADDING = 8  # groups are made smaller, and so more, until at most one byte in so many is padding
TYPICAL_LEN = 2048  # tokens of a request, and of what its encoder reads, for which padding is counted
TYPICAL_BLOCK = 16  # tokens


class Growth(IntEnum):
    """What a layer keeps, in the order of the groups: the request's tokens, the encoder's, or a state."""

    TOKENS = 0
    ENCODER = 1
    STATE = 2


class Kind(NamedTuple):
    """Layers of one kind keep the same tokens, so they can share a block table."""

    growth: Growth
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Location:
    """Where a layer's keys, or its values, are: so many bytes into each block of one plane of a stack."""

    stack: int
    plane: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class LayerLocation:
    """One layer: what it declared, its group, its part of a block, and where that is."""

    spec: CacheSpec
    group: int
    block: BlockShape
    k: Location
    v: Location | None = None


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Where each layer's part of a block is. Groups that grow come first, then encoder groups, then state groups."""

    groups: tuple[Kind, ...]
    layers: tuple[LayerLocation, ...]
    stacks: tuple[tuple[int, int], ...]  # of planes of equal size: how many, and bytes of a block in each

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of the groups that grow with the request."""
        return tuple(kind.window for kind in self.groups if kind.growth is Growth.TOKENS)

    @property
    def num_encoder_groups(self) -> int:
        return sum(kind.growth is Growth.ENCODER for kind in self.groups)

    @property
    def num_state_groups(self) -> int:
        return sum(kind.growth is Growth.STATE for kind in self.groups)

    @property
    def num_fixed_groups(self) -> int:
        return self.num_encoder_groups + self.num_state_groups

    @property
    def block_bytes(self) -> int:
        return sum(count * width for count, width in self.stacks)

    @property
    def padding(self) -> float:
        """The share of a typical request's blocks that nobody uses."""
        tokens = [tokens_held(kind) for kind in self.groups]
        used = sum(tokens[place.group] * block_bytes(place.block) for place in self.layers)
        return 1 - used / (sum(tokens) * self.block_bytes)


def shape_blocks(specs: Sequence[CacheSpec], ops: Kernels, kv_dtype: str, block_size: int) -> list[BlockShape]:
    """Each layer's part of a block."""
    return [
        BlockShape(spec.shape, None, getattr(torch, spec.dtype))
        if isinstance(spec, StateSpec)
        else ops.cache_shapes(spec, kv_dtype, block_size)
        for spec in specs
    ]


def lay_out(specs: Sequence[CacheSpec], blocks: Sequence[BlockShape]) -> CacheLayout:
    """Put layers into groups, and their parts into blocks of one size.

    Layers of equal size form groups as large as the rarest kind, with a plane for the keys and one for the values of
    each. So do layers of one kind, whatever their sizes: they are one group, without padding. Otherwise the size of a
    block is chosen (`choose_block_bytes`), and layers are packed into it.
    """
    kinds = sort_by_kind(specs)
    if len(kinds) == 1 or len({(nbytes(block.k, block), nbytes(block.v, block)) for block in blocks}) == 1:
        num_slots = min(map(len, kinds.values()))
        groups = [
            (kind, layers[start : start + num_slots])
            for kind, layers in kinds.items()
            for start in range(0, len(layers), num_slots)
        ]
        found, stacks = place_in_planes([layers for _, layers in groups], blocks)
    else:
        sizes = [align(nbytes(block.k, block)) + align(nbytes(block.v, block)) for block in blocks]
        demands = [Demand(tokens_held(kind), [sizes[n] for n in layers]) for kind, layers in kinds.items()]
        size = choose_block_bytes(demands)
        groups = [(kind, group) for kind, layers in kinds.items() for group in pack(layers, sizes, size)]
        found, stacks = pack_blocks([layers for _, layers in groups], blocks, size)
    group_of = {layer: group for group, (_, layers) in enumerate(groups) for layer in layers}
    places = tuple(LayerLocation(spec, group_of[n], blocks[n], *found[n]) for n, spec in enumerate(specs))
    return CacheLayout(tuple(kind for kind, _ in groups), places, stacks)


def sort_by_kind(specs: Sequence[CacheSpec]) -> dict[Kind, list[int]]:
    """Layers by kind: those that grow in the order in which their windows come up, then others."""
    kinds: dict[Kind, list[int]] = {}
    for layer, spec in enumerate(specs):
        kinds.setdefault(kind_of(spec), []).append(layer)
    return dict(sorted(kinds.items(), key=lambda item: item[0].growth))


def kind_of(spec: CacheSpec) -> Kind:
    if isinstance(spec, StateSpec):
        return Kind(Growth.STATE)
    return Kind(Growth.ENCODER) if spec.is_cross else Kind(Growth.TOKENS, spec.window)


def tokens_held(kind: Kind) -> int:
    """For how many tokens a typical request holds blocks of a kind. A state is one block, whatever its length."""
    return TYPICAL_BLOCK if kind.growth is Growth.STATE else min(kind.window or TYPICAL_LEN, TYPICAL_LEN)


class Demand(NamedTuple):
    """Layers of one kind: for how many tokens a request holds blocks, and each layer's bytes in a block."""

    num_tokens: int
    sizes: list[int]


def choose_block_bytes(kinds: Sequence[Demand]) -> int:
    """The size of a block: the one with the fewest groups, if little of what a typical request holds is padding.

    If no size has little padding, the one with the least.
    """
    sizes = [size for kind in kinds for size in kind.sizes]
    multiples = {count * size for size in set(sizes) for count in range(1, len(sizes) + 1)}
    sums = {total for kind in kinds for total in accumulate(sorted(kind.sizes, reverse=True))}
    largest = max(sum(kind.sizes) for kind in kinds)
    candidates = sorted(size for size in multiples | sums if max(sizes) <= size <= largest)
    used = sum(kind.num_tokens * sum(kind.sizes) for kind in kinds)

    def cost(size: int) -> tuple[int, int, int]:
        nums_groups = [len(pack(range(len(kind.sizes)), kind.sizes, size)) for kind in kinds]
        total = sum(kind.num_tokens * count * size for kind, count in zip(kinds, nums_groups, strict=True))
        padding = total - used
        return padding if padding > total // MAX_PADDING else 0, sum(nums_groups), padding

    return min(candidates, key=cost)


def pack(layers: Iterable[int], sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Layers into as few groups as first-fit finds, the largest first."""
    groups: list[list[int]] = []
    room: list[int] = []
    for layer in sorted(layers, key=lambda layer: -sizes[layer]):
        nth = next((nth for nth, left in enumerate(room) if sizes[layer] <= left), len(groups))
        if nth == len(groups):
            groups.append([])
            room.append(capacity)
        groups[nth].append(layer)
        room[nth] -= sizes[layer]
    return groups


Places = tuple[dict[int, tuple[Location, Location | None]], tuple[tuple[int, int], ...]]  # by layer; and the stacks


def place_in_planes(groups: Sequence[Sequence[int]], blocks: Sequence[BlockShape]) -> Places:
    """A plane for the keys of each of a group's layers, then one for the values of each that has any.

    A layer's blocks lie one after the other. Planes of equal size form a stack, so that one copy takes them all.
    """
    slots = [blocks[layer] for layer in max(groups, key=len)]
    stacks: list[tuple[int, int]] = []
    locations: list[Location] = []
    for shapes in ([(b.k, b) for b in slots], [(b.v, b) for b in slots if b.v is not None]):
        for width, run in groupby(nbytes(shape, block) for shape, block in shapes):
            count = len(list(run))
            locations += [Location(len(stacks), plane) for plane in range(count)]
            stacks.append((count, width))
    k, v = locations[: len(slots)], iter(locations[len(slots) :])
    pairs = [(its_k, None if block.v is None else next(v)) for its_k, block in zip(k, slots, strict=True)]
    return {layer: pair for layers in groups for layer, pair in zip(layers, pairs, strict=False)}, tuple(stacks)


def pack_blocks(groups: Sequence[Sequence[int]], blocks: Sequence[BlockShape], size: int) -> Places:
    """One plane of whole blocks, in which each layer's keys and values lie at places of their own."""
    found: dict[int, tuple[Location, Location | None]] = {}
    for layers in groups:
        offset = 0
        for layer in layers:
            block = blocks[layer]
            k, offset = Location(0, 0, offset), offset + align(nbytes(block.k, block))
            v, offset = Location(0, 0, offset), offset + align(nbytes(block.v, block))
            found[layer] = k, None if block.v is None else v
        assert offset <= size
    return found, ((1, size),)


def nbytes(shape: tuple[int, ...] | None, block: BlockShape) -> int:
    """Of a block's keys or its values."""
    return 0 if shape is None else math.prod(shape) * block.dtype.itemsize


def block_bytes(block: BlockShape) -> int:
    return nbytes(block.k, block) + nbytes(block.v, block)


def align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class CacheTensors:
    """What all blocks hold. Number 0 exists too: padded table entries point at it and nobody reads it."""

    def __init__(self, layout: CacheLayout, size: CacheSize, device: torch.device, num_host_blocks: int = 0) -> None:
        self._parts = [zeros((count, size.num_blocks + 1, width), device) for count, width in layout.stacks]
        self.layers = [self._view_layer(place, size.block_size) for place in layout.layers]
        self.host = HostBlocks(self._parts, num_host_blocks)

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

    def _view_layer(self, place: LayerLocation, block_size: int) -> LayerCache:
        spec, block = place.spec, place.block
        k = v = self._view(place.k, block.k, block.dtype)
        if place.v is not None and block.v is not None:
            v = self._view(place.v, block.v, block.dtype)
        elif isinstance(spec, KVCacheSpec):
            v = k[..., : spec.value_dim]
        return LayerCache(k, v, place.group, block_size)

    def _view(self, at: Location, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """[blocks, *shape]"""
        plane = self._parts[at.stack][at.plane]
        size = math.prod(shape) * dtype.itemsize
        return plane[:, at.offset : at.offset + size].view(dtype).view(-1, *shape)


def zeros(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Bytes that are zero; on a CPU, pages are mapped when they are first written, so unused ones cost nothing."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    return torch.frombuffer(mmap.mmap(-1, math.prod(shape)), dtype=torch.uint8).view(shape)
