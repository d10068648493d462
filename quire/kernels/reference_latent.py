"""The ops of latent attention (MLA) in plain torch. Part of `reference.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.kernels.paging import LayerCache


def rope_latent(
    q: Tensor, kv: Tensor, weight: Tensor, eps: float, positions: Tensor, table: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Norm latents and rotate what is behind them. q and kv may be overwritten.

    q [tokens, heads, dim + rotated], kv [tokens, 1, latent + rotated], weight [latent], table [max_len, rotated] as for
    `rope`. The first `latent` numbers of kv are normed. The last `rotated` numbers of each head are rotated.
    """
    from quire.kernels.reference import rms_norm, rope

    rotated, latent = table.shape[1], weight.shape[0]
    q_end, kv_end = rope(q[..., -rotated:], kv[..., latent:], positions, table, interleaved)
    normed = rms_norm(kv[..., :latent], weight, eps)
    assert isinstance(normed, Tensor)
    return torch.cat((q[..., :-rotated], q_end), dim=-1), torch.cat((normed, kv_end), dim=-1)


def store_latent(kv: Tensor, rank: int, cache: LayerCache, slots: Tensor) -> None:
    """Write kv [tokens, 1, dim] to the cache, as `store_kv`. The values are its first `rank` numbers, a view of it."""
    stored = slots >= 0
    kv, slots = kv[stored], slots[stored]
    cache.k[slots // cache.block_size, slots % cache.block_size] = kv.to(cache.k.dtype)


def head_linear(x: Tensor, weight: Any) -> Tensor:
    """x [tokens, heads, cols + rest], weight (a Weight [heads * out, cols]) -> [tokens, heads, out + rest].

    The first `cols` numbers of head h are multiplied by the weight's rows h * out to (h + 1) * out. The rest is copied.
    """
    (_, heads, _), (rows, cols) = x.shape, weight.shape
    matrices = (weight.dense().to(x.dtype) if weight.data is None else weight.data).view(heads, rows // heads, cols)
    products = torch.bmm(x[..., :cols].transpose(0, 1), matrices.transpose(1, 2)).transpose(0, 1)
    return torch.cat((products, x[..., cols:]), dim=-1)
