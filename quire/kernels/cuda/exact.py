"""Ops whose sums do not depend on what is computed beside them: a token's numbers are the same, bit for bit, in any
batch, chunk or order. `select` takes these for an engine that is to be exact; it pays for them with speed.

Every product adds up its inputs in their order, on the same instruction whatever the number of rows. Attention walks
through a context from its first key on, in tiles that lie at fixed places, and never splits it. Norms, gates and
rotation compute each row by itself anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import Fused
from quire.kernels.cuda.activation import gelu_mul, silu_mul
from quire.kernels.cuda.attention import NOTHING, find_work
from quire.kernels.cuda.decode import Shape, decode_attention
from quire.kernels.cuda.norm import rms_norm
from quire.kernels.cuda.ops import cache_shapes
from quire.kernels.cuda.prefill import key_tile, prefill_attention
from quire.kernels.cuda.rotary import rope_store, store_kv
from quire.kernels.cuda.scoring import Scoring
from quire.kernels.cuda.skinny import Tile, multiply
from quire.kernels.paging import LayerCache, Paging

__all__ = ["attention", "cache_shapes", "fused", "gelu_mul", "linear", "rms_norm", "silu_mul", "store_kv"]

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


def attention(
    q: Tensor,
    cache: LayerCache,
    paging: Paging,
    *,
    scale: float,
    window: int | None = None,
    slopes: Tensor | None = None,
    softcap: float | None = None,
    own: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """As in the reference."""
    scoring = Scoring(scale, window, slopes, softcap)
    work = find_work(paging, q.device, NOTHING)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tables = paging.block_tables[cache.group]
    shape = Shape(key_tile(q.shape[-1], q.dtype), 4, 2, queries=64, is_exact=True)
    if work.all_single:
        decode_attention(q, cache, tables, paging.seq_lens, out, scoring, shape=shape)
        return out
    if work.singles is not None:
        decode_attention(
            q, cache, tables, paging.seq_lens, out, scoring, work.singles, paging.query_starts, shape=shape
        )
    if work.tiles is not None:
        prefill_attention(q, cache, paging, work.tiles, out, scoring, exact=True)
    return out


def turn_and_attend(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, angles: Tensor, interleaved: bool, cache: LayerCache,
    paging: Paging, *, scale: float, window: int | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    rope_store(q, k, v, positions, angles, interleaved, cache, paging.slots[cache.group])
    return attention(q, cache, paging, scale=scale, window=window, softcap=softcap)


fused = Fused(rope_store, turn_and_attend, gated_linear)
