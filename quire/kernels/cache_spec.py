"""What a layer keeps in the cache. Groups, blocks, storage and swap are worked out from these declarations.

A model makes one for each of its layers (`Decoder.cache_specs`). Whoever else uses the same blocks, such as a draft
model, adds its own. The `cache_shapes` op says how a backend lays out a block; `engine/cache.py` puts blocks together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Keys and values of one attention layer: for each token [num_kv_heads, head_dim] keys and as many values.

    A latent (MLA) has no values of its own: they are the first `value_dim` numbers of each key.
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None  # of a head; None: head_dim
    is_latent: bool = False
    window: int | None = None  # how many tokens one sees, itself included; None for all
    is_cross: bool = False  # cross-attention: holds the encoder's tokens, is filled once and does not grow
    dtype: str | None = None  # None: the engine's kv_dtype


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A state of constant size for each request (Mamba, linear attention). A block holds one whole state."""

    shape: tuple[int, ...]
    dtype: str


CacheSpec = KVCacheSpec | StateSpec


class BlockShape(NamedTuple):
    """One layer's part of a block: the shapes of its keys and its values. `v` is None where there are only keys."""

    k: tuple[int, ...]
    v: tuple[int, ...] | None
    dtype: torch.dtype
