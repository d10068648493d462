"""The ops of `reference` on an NVIDIA GPU, in Triton. Ops that are not here are the reference's.

A block of the cache is [kv_heads, block_size, head_dim]: one head's keys of a block are contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from quire.kernels import Fused, reference
from quire.kernels.cache_spec import BlockShape, KVCacheSpec
from quire.kernels.cuda.activation import activate, gelu_mul, silu_mul
from quire.kernels.cuda.attention.dispatch import attention, rope_attention
from quire.kernels.cuda.attention.whole_prompts import attend_to_prompts
from quire.kernels.cuda.experts.experts import experts
from quire.kernels.cuda.experts.route import route
from quire.kernels.cuda.gemm.skinny import gated_linear, linear
from quire.kernels.cuda.latent import head_linear, rope_store_latent, store_latent
from quire.kernels.cuda.launch import launchers
from quire.kernels.cuda.norm import layer_norm, rms_norm
from quire.kernels.cuda.rope import rope_store, store_kv
from quire.kernels.cuda.sampling.logits_processors import apply_token_bitmask, penalize
from quire.kernels.paging import LayerCache

__all__ = [
    "activate", "apply_token_bitmask", "attention", "cache_shapes", "experts", "fused", "gelu_mul", "head_linear",
    "layer_norm", "linear", "move_kv", "penalize", "rms_norm", "route", "silu_mul", "store_kv", "store_latent",
]  # fmt: skip

launchers.use()
fused = Fused(rope_store, rope_attention, gated_linear, rope_store_latent, attend_to_prompts)


def cache_shapes(spec: KVCacheSpec, dtype: str, block_size: int) -> BlockShape:
    assert spec.is_latent or spec.value_dim in (None, spec.head_dim), "these kernels take keys and values of one size"
    dtype, shape = spec.dtype or dtype, (spec.num_kv_heads, block_size, spec.head_dim)
    return BlockShape(shape, None if spec.is_latent else shape, "float8_e4m3fn" if dtype == "fp8" else dtype)


def move_kv(layers: Sequence[LayerCache], moves: Sequence[tuple[Tensor, Tensor]]) -> None:
    by_token = [
        LayerCache(layer.k.transpose(1, 2), layer.v.transpose(1, 2), layer.group, layer.block_size)
        for layer in layers
        if layer.group < len(moves)
    ]
    reference.move_kv(by_token, moves)
