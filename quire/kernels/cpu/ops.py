"""The ops that torch can do faster on a CPU than the reference does; same names, same meanings.

At one token a step the time goes into calls rather than into arithmetic, so these make few of them. A row is computed
from its own tokens alone, whoever shares the step: rows are batched only where their contexts are equally long, and
torch's attention kernel then works on each as if it were alone.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels import reference
from quire.kernels.paging import LayerCache, Paging


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    if x.dtype != torch.float32:
        return reference.rms_norm(x, weight, eps, residual)
    if residual is not None:
        x = residual.add_(x)
    scale = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    normed = torch.mul(x, scale).mul_(weight)
    return normed if residual is None else (normed, x)


def rope(q: Tensor, k: Tensor, positions: Tensor, table: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    dim = table.shape[1]
    if q.dtype != torch.float32 or q.shape[-1] != dim:
        return reference.rope(q, k, positions, table, interleaved)
    x = torch.cat((q, k), dim=1)
    cos, sin = table.index_select(0, positions).unsqueeze_(1).chunk(2, dim=-1)
    out = torch.empty_like(x)
    (a, b), (to_a, to_b) = _pairs(x, interleaved), _pairs(out, interleaved)
    torch.mul(a, cos, out=to_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=to_b).addcmul_(a, sin)
    return out[:, : q.shape[1]], out[:, q.shape[1] :]


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, dim=-1)
    return first, second


def store_kv(k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> None:
    for new, kept in ((k, cache.k), (v, cache.v)):
        # view, not flatten: a cache whose slots do not lie one after the other must fail, not be copied.
        kept.view(-1, *kept.shape[2:]).index_copy_(0, slots, new.to(kept.dtype))


def silu_mul(gate_up: Tensor) -> Tensor:
    if gate_up.dtype != torch.float32:
        return reference.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    if gate_up.dtype != torch.float32:
        return reference.gelu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


def attention(
    q: Tensor,
    cache: LayerCache,
    paging: Paging,
    *,
    scale: float,
    window: int | None = None,
    slopes: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    if slopes is not None or softcap is not None:
        return reference.attention(q, cache, paging, scale=scale, window=window, slopes=slopes, softcap=softcap)
    out = q.new_empty(*q.shape[:2], cache.v.shape[-1])
    singles: dict[int, list[int]] = {}
    for row, (start, stop) in enumerate(pairwise(paging.host_query_starts)):
        if stop - start == 1:
            singles.setdefault(paging.host_seq_lens[row], []).append(row)
        elif start < stop:
            out[start:stop] = _attend_chunk(q[start:stop], cache, paging, row, scale, window)
    for rows in singles.values():
        _attend_singles(q, out, cache, paging, rows, scale, window)
    return out


def _attend_chunk(q: Tensor, cache: LayerCache, paging: Paging, row: int, scale: float, window: int | None) -> Tensor:
    """q [n, heads, dim] of one row -> [n, heads, dim]."""
    k, v = reference.read_row(cache, paging, row, window)
    whole = len(q) == len(k) and paging.ancestors is None and (window is None or len(q) <= window)
    visible = None if whole else reference.see(paging, row, window, q.device)[2]
    out = functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.to(q.dtype).transpose(0, 1)[None],
        v.to(q.dtype).transpose(0, 1)[None],
        attn_mask=visible,
        is_causal=whole,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


def _attend_singles(
    q: Tensor, out: Tensor, cache: LayerCache, paging: Paging, rows: list[int], scale: float, window: int | None
) -> None:
    """Rows of one query and equally long contexts. A query sees all its keys, so the heads that share a key head stand
    in for several queries of it and nothing is masked or repeated."""
    first, seq_len, size = (
        reference.first_key(paging, rows[0], window),
        paging.host_seq_lens[rows[0]],
        paging.block_size,
    )
    table = paging.block_tables[cache.group][:, first // size : -(-seq_len // size)]
    tokens: slice | Tensor
    if len(rows) == 1:
        table, tokens = table[rows[0]], slice(start := paging.host_query_starts[rows[0]], start + 1)
    elif len(rows) == len(q) == len(table):
        tokens = slice(None)
    else:
        table, tokens = table[rows], torch.tensor([paging.host_query_starts[row] for row in rows])
    skip, kv_heads = first % size, cache.k.shape[2]
    blocks, keys = table.flatten(), slice(skip, skip + seq_len - first)
    k, v = (_read_blocks(part, blocks, len(rows), keys, q.dtype) for part in (cache.k, cache.v))
    grouped = q[tokens].view(len(rows), kv_heads, q.shape[1] // kv_heads, -1)
    out[tokens] = functional.scaled_dot_product_attention(grouped, k, v, scale=scale).flatten(1, 2)


def _read_blocks(part: Tensor, blocks: Tensor, rows: int, keys: slice, dtype: torch.dtype) -> Tensor:
    """The blocks of `rows` rows, end to end in `blocks` -> [rows, kv_heads, keys, dim]."""
    read = part.index_select(0, blocks).view(rows, -1, *part.shape[2:])[:, keys]
    return read.to(dtype).transpose(1, 2)
