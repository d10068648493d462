"""Batch-invariant ops: a token's results are the same, bit for bit, in any batch, chunk or order. They are slower.
`select` returns them with `exact`.

A matmul adds its inputs in order, with the same instruction for any number of rows. Attention starts at the first key
of a context, in tiles at fixed positions, and never splits a context. Norms, gates and rotation compute each row
independently in any case.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from quire.kernels import Fused
from quire.kernels.cuda.activation import activate, gelu_mul, silu_mul
from quire.kernels.cuda.attention import dispatch
from quire.kernels.cuda.experts import experts as mixture
from quire.kernels.cuda.experts.route import route
from quire.kernels.cuda.gemm.skinny import Tile, multiply
from quire.kernels.cuda.latent import head_linear, rope_store_latent, store_latent
from quire.kernels.cuda.norm import layer_norm, rms_norm
from quire.kernels.cuda.ops import cache_shapes, move_kv
from quire.kernels.cuda.rope import rope_store, store_kv
from quire.kernels.cuda.sampling.logits_processors import apply_token_bitmask, penalize

__all__ = [
    "activate", "apply_token_bitmask", "attention", "cache_shapes", "experts", "fused", "gelu_mul", "head_linear",
    "layer_norm", "linear", "move_kv", "penalize", "rms_norm", "route", "silu_mul", "store_kv", "store_latent",
]  # fmt: skip

FEW_ROWS = 64
FEW_ROWS_TILE, MANY_ROWS_TILE = Tile(64, 128, 4, 5), Tile(128, 64, 8, 3, max_rows=128)
FLOAT32_TILE = Tile(64, 32, 4, 2)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in], weight [out, in] -> x W^T"""
    if x.dtype == torch.float32:
        return multiply(x.contiguous(), weight, FLOAT32_TILE)
    is_few = x.numel() <= FEW_ROWS * x.shape[-1]
    return multiply(x.contiguous(), weight, FEW_ROWS_TILE if is_few else MANY_ROWS_TILE)


def gated_linear(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    return (silu_mul if activation == "silu" else gelu_mul)(linear(x, weight))


attention = partial(dispatch.attention, exact=True)
experts = partial(mixture.experts, exact=True)
fused = Fused(rope_store, partial(dispatch.rope_attention, exact=True), gated_linear, rope_store_latent)
