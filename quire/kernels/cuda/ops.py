"""The ops of `reference` on an NVIDIA GPU, in Triton. `select` takes from here what is here.

A block of the cache is [kv_heads, block_size, head_dim]: one head's keys of a block lie side by side.
"""

from __future__ import annotations

import torch

from quire.kernels import Fused
from quire.kernels.cuda import launchers
from quire.kernels.cuda.activation import activate, gelu_mul, silu_mul
from quire.kernels.cuda.attention import attention, turn_and_attend
from quire.kernels.cuda.norm import layer_norm, rms_norm
from quire.kernels.cuda.rotary import rope_store, store_kv
from quire.kernels.cuda.skinny import gated_linear, linear
from quire.kernels.reference import DTYPES

__all__ = [
    "activate", "attention", "cache_shapes", "fused", "gelu_mul", "layer_norm", "linear", "rms_norm", "silu_mul",
    "store_kv",
]  # fmt: skip

launchers.use()
fused = Fused(rope_store, turn_and_attend, gated_linear)


def cache_shapes(
    dtype: str, block_size: int, kv_heads: int, head_dim: int
) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    shape = (kv_heads, block_size, head_dim)
    return shape, shape, torch.float8_e4m3fn if dtype == "fp8" else DTYPES[dtype]
