"""What a layer stores in the cache. Groups, blocks, storage and swap are computed from these specs.

A model has one for each of its layers (`Decoder.cache_specs`). Another user of the same blocks, such as a draft model,
adds its own. The `cache_shapes` op returns a backend's layout of a block. `engine/cache.py` allocates the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from quire.kernels.arrays import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Keys and values of one attention layer: [num_kv_heads, head_dim] keys and values a token.

    A latent (MLA) has no values of its own: they are the first `value_dim` numbers of each key.
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None  # of a head; None: head_dim
    is_latent: bool = False
    window: int | None = None  # tokens that a token sees, itself included; None for all
    is_cross: bool = False  # cross-attention: the encoder's tokens; filled once, does not grow
    dtype: str | None = None  # None: the engine's kv_dtype
    shares: int | None = None  # it stores nothing and reads what the layer so many layers before it stores


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A state of constant size for each request (Mamba, linear attention). A block holds one whole state."""

    shape: tuple[int, ...]
    dtype: str


CacheSpec = KVCacheSpec | StateSpec


class BlockShape(NamedTuple):
    """The shapes of one layer's keys and values in a block. `v` is None if there are only keys."""

    k: tuple[int, ...]
    v: tuple[int, ...] | None
    dtype: str  # a key of ITEM_BYTES

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]


def cache_shapes(spec: KVCacheSpec, dtype: str, block_size: int) -> BlockShape:
    """The memory layout of a block of a layer's keys and values in the reference. `dtype` is for layers that declare
    none."""
    k, v = ((block_size, spec.num_kv_heads, dim) for dim in (spec.head_dim, spec.value_dim or spec.head_dim))
    return BlockShape(k, None if spec.is_latent else v, spec.dtype or dtype)
