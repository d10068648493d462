"""Ops whose sums do not depend on what is computed beside them: a token's numbers are the same, bit for bit, in any
batch, chunk or order. `select` takes these for an engine that is to be exact; it pays for them with speed.

Every product adds up its inputs in their order, on the same instruction whatever the number of rows. Attention walks
through a context from its first key on, in tiles that lie at fixed places, and never splits it. Norms, gates and
rotation compute each row by itself anyway.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from quire.kernels import Fused
from quire.kernels.cuda.activation import activate, gelu_mul, silu_mul
from quire.kernels.cuda.attention import dispatch as ways
from quire.kernels.cuda.gemm.skinny import Tile, multiply
from quire.kernels.cuda.norm import layer_norm, rms_norm
from quire.kernels.cuda.ops import cache_shapes
from quire.kernels.cuda.rope import rope_store, store_kv
from quire.kernels.cuda.sampling.logits_processors import apply_token_bitmask, penalize

__all__ = [
    "activate", "apply_token_bitmask", "attention", "cache_shapes", "fused", "gelu_mul", "layer_norm", "linear",
    "penalize", "rms_norm", "silu_mul", "store_kv",
]  # fmt: skip

FEW_ROWS = 64
FEW, MANY = Tile(64, 128, 4, 5), Tile(128, 64, 8, 3, max_rows=128)
IN_FLOAT32 = Tile(64, 32, 4, 2)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in], weight [out, in] -> x W^T"""
    if x.dtype == torch.float32:
        return multiply(x.contiguous(), weight, IN_FLOAT32)
    is_few = x.numel() <= FEW_ROWS * x.shape[-1]
    return multiply(x.contiguous(), weight, FEW if is_few else MANY)


def gated_linear(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    return (silu_mul if activation == "silu" else gelu_mul)(linear(x, weight))


attention = partial(ways.attention, exact=True)
fused = Fused(rope_store, partial(ways.rope_attention, exact=True), gated_linear)
