"""The KV cache's memory, and where each layer's keys and values are in a block. `core/` allocates blocks by number.

Each layer declares what it caches (`kernels/cache_spec.py`). Layers that cache the same tokens form groups:
self-attention layers of the same window, cross-attention layers, state layers. A group has its own block table. A block
of a group holds the keys and values of `block_size` tokens for all its layers. All blocks have the same size, so one
pool serves all groups.

Two memory layouts. Planes, for layers of equal size; packed, for groups whose layers differ in size:

    planes   keys, plane 0     [block 0][block 1] ...     group 0: layers 0 and 1, group 1: layers 2 and 3
             keys, plane 1     [block 0][block 1] ...     layers 0 and 2 share plane 0: a block belongs to one group
             values, plane 0   ...
    packed   [block 0][block 1] ... [ block 7: k0 v0 k1 v1 padding, or k2 v2 padding ] ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from hashlib import blake2b
from itertools import accumulate, groupby
from typing import NamedTuple

from quire.engine.host_blocks import HostBlocks
from quire.engine.memory import CacheSize
from quire.errors import NotEnoughMemory
from quire.kernels import Kernels
from quire.kernels.arrays import Array, Arrays
from quire.kernels.cache_spec import BlockShape, CacheSpec, KVCacheSpec, StateSpec
from quire.kernels.paging import LayerCache
from quire.models.config import ModelConfig

ALIGNMENT = 256  # bytes, of each layer's keys and values in a packed block: a multiple of every kernel's tile rows
MAX_PADDING = 8  # at most one byte in 8 is padding, if any block size allows that
TYPICAL_LEN = 2048  # tokens of a request and of its encoder input, assumed when padding is estimated
TYPICAL_BLOCK = 16  # tokens


class CacheType(IntEnum):
    """What a layer caches. Groups are sorted by it."""

    SELF_ATTENTION = 0
    CROSS_ATTENTION = 1
    STATE = 2


class GroupKind(NamedTuple):
    """Layers of one kind cache the same tokens, so they can share a block table."""

    cache_type: CacheType
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Location:
    """Where a layer's keys, or its values, are: a plane of a stack, and a byte offset in each of its blocks."""

    stack: int
    plane: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """One layer's spec, its group, the shape of its keys and values in a block, and their locations."""

    spec: CacheSpec
    group: int
    block: BlockShape
    k: Location
    v: Location | None = None


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Where each layer's keys and values are. Groups are in the order of `CacheType`."""

    groups: tuple[GroupKind, ...]
    layers: tuple[LayerLayout, ...]
    stacks: tuple[tuple[int, int], ...]  # planes of equal size: their number, and bytes of a block in each

    @property
    def stored(self) -> tuple[LayerLayout, ...]:
        """The layers without those that share another's keys and values."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """One for each self-attention group."""
        return tuple(kind.window for kind in self.groups if kind.cache_type is CacheType.SELF_ATTENTION)

    @property
    def num_encoder_groups(self) -> int:
        return sum(kind.cache_type is CacheType.CROSS_ATTENTION for kind in self.groups)

    @property
    def num_state_groups(self) -> int:
        return sum(kind.cache_type is CacheType.STATE for kind in self.groups)

    @property
    def num_fixed_groups(self) -> int:
        return self.num_encoder_groups + self.num_state_groups

    @property
    def block_bytes(self) -> int:
        return sum(count * width for count, width in self.stacks)

    @property
    def padding(self) -> float:
        """The unused fraction of a typical request's blocks."""
        tokens = [tokens_held(kind) for kind in self.groups]
        used = sum(tokens[layer.group] * block_bytes(layer.block) for layer in self.stored)
        return 1 - used / (sum(tokens) * self.block_bytes)


def shape_blocks(specs: Sequence[CacheSpec], ops: Kernels, kv_dtype: str, block_size: int) -> list[BlockShape]:
    """The shape of each layer's keys and values in a block."""
    return [
        BlockShape(spec.shape, None, spec.dtype)
        if isinstance(spec, StateSpec)
        else ops.cache_shapes(spec, kv_dtype, block_size)
        for spec in specs
    ]


def lay_out(specs: Sequence[CacheSpec], blocks: Sequence[BlockShape]) -> CacheLayout:
    """Assign layers to groups whose blocks have the same size.

    If all layers have the same size, each group has as many layers as the rarest kind, and each layer of a group has a
    plane for keys and one for values. If all layers are of one kind, they form one group with the same planes.
    Otherwise `choose_block_bytes` chooses the block size, and layers are packed into blocks.

    A layer that shares another's keys and values has that layer's layout.
    """
    sources = [find_source(specs, layer) for layer in range(len(specs))]
    stored = [layer for layer, source in enumerate(sources) if layer == source]
    layout = lay_out_stored([specs[layer] for layer in stored], [blocks[layer] for layer in stored])
    layouts = dict(zip(stored, layout.layers, strict=True))
    return replace(layout, layers=tuple(layouts[source] for source in sources))


def find_source(specs: Sequence[CacheSpec], layer: int) -> int:
    """The layer whose keys and values a layer reads."""
    spec = specs[layer]
    if not isinstance(spec, KVCacheSpec) or spec.shares is None:
        return layer
    assert replace(spec, shares=None) == specs[layer - spec.shares], layer
    return layer - spec.shares


def lay_out_stored(specs: Sequence[CacheSpec], blocks: Sequence[BlockShape]) -> CacheLayout:
    """As `lay_out`, of layers that all store their own."""
    kinds = sort_by_kind(specs)
    if len(kinds) == 1 or len({(nbytes(block.k, block), nbytes(block.v, block)) for block in blocks}) == 1:
        group_size = min(map(len, kinds.values()))
        groups = [
            (kind, layers[start : start + group_size])
            for kind, layers in kinds.items()
            for start in range(0, len(layers), group_size)
        ]
        locations, stacks = assign_planes([layers for _, layers in groups], blocks)
    else:
        sizes = [align(nbytes(block.k, block)) + align(nbytes(block.v, block)) for block in blocks]
        kind_sizes = [KindSizes(tokens_held(kind), [sizes[n] for n in layers]) for kind, layers in kinds.items()]
        size = choose_block_bytes(kind_sizes)
        groups = [(kind, group) for kind, layers in kinds.items() for group in first_fit(layers, sizes, size)]
        locations, stacks = assign_offsets([layers for _, layers in groups], blocks, size)
    group_of = {layer: group for group, (_, layers) in enumerate(groups) for layer in layers}
    layouts = tuple(LayerLayout(spec, group_of[n], blocks[n], *locations[n]) for n, spec in enumerate(specs))
    return CacheLayout(tuple(kind for kind, _ in groups), layouts, stacks)


def sort_by_kind(specs: Sequence[CacheSpec]) -> dict[GroupKind, list[int]]:
    """Layer indices by kind, sorted by `CacheType`; kinds of one type are in the order of their first layers."""
    kinds: dict[GroupKind, list[int]] = {}
    for layer, spec in enumerate(specs):
        kinds.setdefault(kind_of(spec), []).append(layer)
    return dict(sorted(kinds.items(), key=lambda item: item[0].cache_type))


def kind_of(spec: CacheSpec) -> GroupKind:
    if isinstance(spec, StateSpec):
        return GroupKind(CacheType.STATE)
    return GroupKind(CacheType.CROSS_ATTENTION) if spec.is_cross else GroupKind(CacheType.SELF_ATTENTION, spec.window)


def tokens_held(kind: GroupKind) -> int:
    """Tokens for which a typical request holds blocks of a kind. A state is one block at any length."""
    return TYPICAL_BLOCK if kind.cache_type is CacheType.STATE else min(kind.window or TYPICAL_LEN, TYPICAL_LEN)


class KindSizes(NamedTuple):
    """For layers of one kind: the tokens for which a request holds blocks, and each layer's bytes in a block."""

    num_tokens: int
    sizes: list[int]


def choose_block_bytes(kinds: Sequence[KindSizes]) -> int:
    """The block size with the fewest groups, among those that keep padding within 1 / MAX_PADDING.

    If no size does, the one with the least padding.
    """
    sizes = [size for kind in kinds for size in kind.sizes]
    multiples = {count * size for size in set(sizes) for count in range(1, len(sizes) + 1)}
    sums = {total for kind in kinds for total in accumulate(sorted(kind.sizes, reverse=True))}
    largest = max(sum(kind.sizes) for kind in kinds)
    candidates = sorted(size for size in multiples | sums if max(sizes) <= size <= largest)
    used = sum(kind.num_tokens * sum(kind.sizes) for kind in kinds)

    def cost(size: int) -> tuple[int, int, int]:
        nums_groups = [len(first_fit(range(len(kind.sizes)), kind.sizes, size)) for kind in kinds]
        total = sum(kind.num_tokens * count * size for kind, count in zip(kinds, nums_groups, strict=True))
        padding = total - used
        return padding if padding > total // MAX_PADDING else 0, sum(nums_groups), padding

    return min(candidates, key=cost)


def first_fit(layers: Iterable[int], sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack layers into groups of at most `capacity` bytes: first-fit, largest layer first."""
    groups: list[list[int]] = []
    free: list[int] = []  # bytes, in each group
    for layer in sorted(layers, key=lambda layer: -sizes[layer]):
        nth = next((nth for nth, left in enumerate(free) if sizes[layer] <= left), len(groups))
        if nth == len(groups):
            groups.append([])
            free.append(capacity)
        groups[nth].append(layer)
        free[nth] -= sizes[layer]
    return groups


Locations = tuple[dict[int, tuple[Location, Location | None]], tuple[tuple[int, int], ...]]  # by layer; and stacks


def assign_planes(groups: Sequence[Sequence[int]], blocks: Sequence[BlockShape]) -> Locations:
    """Give each layer of a group a plane for its keys, and one for its values if it has any.

    The blocks of a plane are contiguous. Planes of equal size form a stack, so that one copy moves all of them.
    """
    largest = [blocks[layer] for layer in max(groups, key=len)]
    stacks: list[tuple[int, int]] = []
    locations: list[Location] = []
    for shapes in ([(b.k, b) for b in largest], [(b.v, b) for b in largest if b.v is not None]):
        for width, run in groupby(nbytes(shape, block) for shape, block in shapes):
            count = len(list(run))
            locations += [Location(len(stacks), plane) for plane in range(count)]
            stacks.append((count, width))
    k, v = locations[: len(largest)], iter(locations[len(largest) :])
    pairs = [(its_k, None if block.v is None else next(v)) for its_k, block in zip(k, largest, strict=True)]
    return {layer: pair for layers in groups for layer, pair in zip(layers, pairs, strict=False)}, tuple(stacks)


def assign_offsets(groups: Sequence[Sequence[int]], blocks: Sequence[BlockShape], size: int) -> Locations:
    """Give each layer of a group byte offsets for its keys and values. All blocks are in one plane."""
    locations: dict[int, tuple[Location, Location | None]] = {}
    for layers in groups:
        offset = 0
        for layer in layers:
            block = blocks[layer]
            k, offset = Location(0, 0, offset), offset + align(nbytes(block.k, block))
            v, offset = Location(0, 0, offset), offset + align(nbytes(block.v, block))
            locations[layer] = k, None if block.v is None else v
        assert offset <= size
    return locations, ((1, size),)


def nbytes(shape: tuple[int, ...] | None, block: BlockShape) -> int:
    """Bytes of a block's keys or of its values."""
    return 0 if shape is None else math.prod(shape) * block.item_bytes


def block_bytes(block: BlockShape) -> int:
    return nbytes(block.k, block) + nbytes(block.v, block)


def align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def fingerprint_cache(model: ModelConfig, weight_bytes: int, layout: CacheLayout, block_size: int, ops: str) -> str:
    """Equal for engines whose blocks have the same contents: one model, one layout, one kind of kernels."""
    return blake2b(repr((model, weight_bytes, layout, block_size, ops)).encode(), digest_size=16).hexdigest()


def keep_sources(moves: Sequence[tuple[int, int]]) -> bool:
    """Whether no move's source is the target of an earlier move."""
    targets: set[int] = set()
    for source, target in moves:
        if source in targets:
            return False
        targets.add(target)
    return True


class CacheTensors:
    """The memory of all blocks. Block 0 is the null block: padded table entries point to it, and it is never read."""

    is_whole = True  # blocks have the keys and values of all heads

    def __init__(
        self,
        layout: CacheLayout,
        size: CacheSize,
        arrays: Arrays,
        num_host_blocks: int = 0,
        move_kv: Callable[[Sequence[LayerCache], Sequence[tuple[Array, Array]]], None] | None = None,
    ) -> None:
        """`move_kv` is the backend's op. It is needed only for `move_tokens`."""
        self._arrays = arrays
        self._move_kv = move_kv
        try:
            self._stacks = [arrays.map_bytes((count, size.num_blocks + 1, width)) for count, width in layout.stacks]
        except (OSError, MemoryError) as error:  # of the host: a limit on the process that free memory does not show
            raise NotEnoughMemory(
                f"This process may not map {size.nbytes:,} bytes for the cache ({error}). "
                "Lower kv_memory (--kv-memory) or raise the limit (ulimit -v)."
            ) from None
        views = {layer: self._view_layer(layer, size.block_size) for layer in layout.stored}
        self.layers = [views[layer] for layer in layout.layers]
        self._stored_ids: list[int] = []
        self._stored: list[LayerCache] = []
        self.host = HostBlocks(self._stacks, num_host_blocks, arrays)

    @property
    def stored_layers(self) -> list[LayerCache]:
        """Each of `layers` once: layers that share keys and values have the same object. The list is made once, too,
        because backends describe it for their kernels when it is another one."""
        ids = [id(layer) for layer in self.layers]
        if ids != self._stored_ids:
            self._stored_ids, self._stored = ids, list(dict(zip(ids, self.layers, strict=True)).values())
        return self._stored

    def swap_blocks(self, swap_out: Sequence[tuple[int, int]], swap_in: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks to the host, each (block, host block), then others back, each (host block, block)."""
        if swap_out:
            self.host.save(swap_out)
        if swap_in:
            self.host.load(swap_in)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, in order: a source may be an earlier target."""
        for source, target in copies:
            for stack in self._stacks:
                stack[:, target] = stack[:, source]

    def move_tokens(self, moves: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Copy the keys and values of tokens to other slots, in all layers, asynchronously on a GPU.

        For each group that grows: its moves, each (source slot, target slot). A target may be the source of an earlier
        move. No source is the target of an earlier one. So if tokens are moved towards the front of their row, those in
        front come first.
        """
        assert self._move_kv is not None
        assert all(keep_sources(pairs) for pairs in moves), moves
        if any(moves):
            self._move_kv(self.stored_layers, [self._put_slots(pairs) for pairs in moves])

    def _put_slots(self, pairs: Sequence[tuple[int, int]]) -> tuple[Array, Array]:
        """Sources and targets."""
        columns = self._arrays.put([[pair[side] for pair in pairs] for side in (0, 1)], "int64")
        return columns[0], columns[1]

    def _view_layer(self, layer: LayerLayout, block_size: int) -> LayerCache:
        spec, block = layer.spec, layer.block
        k = v = self._view(layer.k, block.k, block)
        if layer.v is not None and block.v is not None:
            v = self._view(layer.v, block.v, block)
        elif isinstance(spec, KVCacheSpec):
            v = k[..., : spec.value_dim]
        return LayerCache(k, v, layer.group, block_size)

    def _view(self, location: Location, shape: tuple[int, ...], block: BlockShape) -> Array:
        """[blocks, *shape]"""
        plane = self._stacks[location.stack][location.plane]
        held = plane[:, location.offset : location.offset + nbytes(shape, block)]
        return self._arrays.view_bytes(held, block.dtype, shape)
