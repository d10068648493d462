"""The ops of `reference` that have a faster implementation in torch on a CPU. Names and meanings are the same.

In a step of one token, calls take more time than arithmetic, so these ops make few calls. The result of a row does not
depend on the other rows of the step. Rows are batched only if their contexts have the same length; torch's attention
kernel then computes each row separately.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels import reference
from quire.kernels.paging import LayerCache, Paging

# For each byte of a mask, the values to add to its eight tokens. A branch for each token would take ten times as long.
BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
BITS_TO_ADDENDS = np.where(BITS, 0.0, -np.inf).astype(np.float32)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    if x.dtype != torch.float32:
        return reference.rms_norm(x, weight, eps, residual)
    if residual is not None:
        x = residual.add_(x)
    scale = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    normed = torch.mul(x, scale).mul_(weight)
    return normed if residual is None else (normed, x)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        return reference.layer_norm(x, weight, bias, eps, residual)
    if residual is not None:
        x = residual.add_(x)
    normed = functional.layer_norm(x, weight.shape, weight, bias, eps)
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
    turned_q, turned_k = out.split_with_sizes((q.shape[1], k.shape[1]), dim=1)
    return turned_q, turned_k


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, dim=-1)
    return first, second


def store_kv(k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> None:
    if len(slots) and int(slots.min()) < 0:
        reference.store_kv(k, v, cache, slots)
        return
    for new, kept in ((k, cache.k), (v, cache.v)):
        if kept.is_contiguous():
            kept.view(-1, *kept.shape[2:]).index_copy_(0, slots, new.to(kept.dtype))
        else:  # there are keys of other layers between two blocks
            kept[slots // cache.block_size, slots % cache.block_size] = new.to(kept.dtype)


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
    sinks: Tensor | None = None,
) -> Tensor:
    if slopes is not None or softcap is not None or sinks is not None:
        return reference.attention(
            q, cache, paging, scale=scale, window=window, slopes=slopes, softcap=softcap, sinks=sinks
        )
    singles: dict[int, list[int]] = {}
    chunks: list[int] = []
    for row, (start, stop) in enumerate(pairwise(paging.host_query_starts)):
        if stop - start == 1:
            singles.setdefault(paging.host_seq_lens[row], []).append(row)
        elif start < stop:
            chunks.append(row)
    if len(singles) == 1:
        (rows,) = singles.values()
        if len(rows) == q.shape[0]:
            return _attend_singles(q, cache, paging, rows, scale, window)
    out = q.new_empty(q.shape[0], q.shape[1], cache.v.shape[-1])
    for row in chunks:
        tokens = slice(paging.host_query_starts[row], paging.host_query_starts[row + 1])
        out[tokens] = _attend_chunk(q[tokens], cache, paging, row, scale, window)
    for rows in singles.values():
        at = torch.tensor([paging.host_query_starts[row] for row in rows])
        out[at] = _attend_singles(q[at], cache, paging, rows, scale, window)
    return out


def _attend_chunk(q: Tensor, cache: LayerCache, paging: Paging, row: int, scale: float, window: int | None) -> Tensor:
    """q [n, heads, dim] of one row -> [n, heads, dim]."""
    k, v = reference.read_row(cache, paging, row, window)
    whole = len(q) == len(k) and not paging.has_tree(row) and (window is None or len(q) <= window)
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
    q: Tensor, cache: LayerCache, paging: Paging, rows: list[int], scale: float, window: int | None
) -> Tensor:
    """q [rows, heads, dim] of rows with one query and equally long contexts -> [rows, heads, dim].

    A query sees all keys that are read, so nothing is masked. The query heads of a key head are passed as several
    queries of one head, so no key is repeated.
    """
    size, seq_len = paging.block_size, paging.host_seq_lens[rows[0]]
    first = reference.first_key(paging, rows[0], window)
    table, used = paging.block_tables[cache.group], slice(first // size, -(-seq_len // size))
    blocks = table[rows[0], used] if len(rows) == 1 else table[rows, used].flatten()
    keys = slice(first % size, first % size + seq_len - first)
    k = _read_blocks(cache.k, blocks, len(rows), keys, q.dtype)
    v = _read_blocks(cache.v, blocks, len(rows), keys, q.dtype)
    grouped = q.view(len(rows), k.shape[1], -1, q.shape[2])
    return functional.scaled_dot_product_attention(grouped, k, v, scale=scale).flatten(1, 2)


def _read_blocks(part: Tensor, blocks: Tensor, rows: int, keys: slice, dtype: torch.dtype) -> Tensor:
    """blocks: the blocks of all rows, row after row -> [rows, kv_heads, keys, dim]."""
    read = part.index_select(0, blocks).view(rows, -1, part.shape[2], part.shape[3])[:, keys].transpose(1, 2)
    return read if read.dtype == dtype else read.to(dtype)


def apply_token_bitmask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    for row, mask in zip(rows.tolist(), bits.numpy(), strict=True):
        addends = BITS_TO_ADDENDS.take(mask, axis=0).reshape(-1)[: logits.shape[1]]
        logits[row, : len(addends)] += torch.from_numpy(addends)
        logits[row, len(addends) :] = -torch.inf
