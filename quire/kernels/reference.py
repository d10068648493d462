"""The ops, in plain torch. This module is the interface, and every backend is checked against it.

It runs on any device, in float32, bfloat16 or float16. Norms, rotations and softmax are computed in float32 and rounded
once at the end. `select` returns these ops, overridden by a backend's functions of the same name.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels.cache_spec import cache_shapes
from quire.kernels.gumbel import gumbel
from quire.kernels.paging import LayerCache, Paging
from quire.kernels.reference_experts import experts, route
from quire.kernels.reference_latent import head_linear, rope_latent, store_latent
from quire.kernels.reference_sampling import beam_candidates, logprobs, sample
from quire.kernels.sampling import IN_PROMPT
from quire.kernels.taps import TappedModel
from quire.kernels.torch_arrays import TorchArrays

__all__ = [
    "activate",
    "add",
    "apply_token_bitmask",
    "arrays",
    "attention",
    "beam_candidates",
    "cache_shapes",
    "count_tokens",
    "experts",
    "gelu_mul",
    "gumbel",
    "head_linear",
    "layer_norm",
    "linear",
    "logits",
    "logprobs",
    "move_kv",
    "multiply",
    "penalize",
    "record",
    "rms_norm",
    "rope",
    "rope_latent",
    "route",
    "sample",
    "silu_mul",
    "store_kv",
    "store_latent",
]


arrays = TorchArrays


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """x [..., size], weight [size] -> x / rms(x) * weight, in x's dtype.

    With a residual (shaped like x) the sum of both is normed, and (normed, sum) is returned. A backend may write the
    sum into `residual`, so callers must not use the passed residual afterwards.
    """
    if residual is not None:
        x = x + residual
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = (normed * weight.float()).to(x.dtype)
    return normed if residual is None else (normed, x)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """x [..., size], weight and bias [size] -> (x - mean) / deviation * weight + bias, in x's dtype.

    A residual is added first, and the sum is returned, as in `rms_norm`.
    """
    if residual is not None:
        x = x + residual
    bias = None if bias is None else bias.float()
    normed = functional.layer_norm(x.float(), weight.shape, weight.float(), bias, eps).to(x.dtype)
    return normed if residual is None else (normed, x)


def add(x: Tensor, y: Tensor, factor: float = 1.0) -> Tensor:
    """Two tensors of one shape -> their sum, times `factor`. Used where no norm adds them: token and position
    embeddings, for example."""
    return x + y if factor == 1.0 else (x + y) * factor


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """Two tensors of one shape -> their product, element by element."""
    return x * y


def rope(q: Tensor, k: Tensor, positions: Tensor, table: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Rotate q [tokens, heads, head_dim] and k [tokens, kv_heads, head_dim] to positions [tokens] int64.

    table [max_len, dim] float32 holds dim / 2 cosines, then dim / 2 sines, for each position. The first `dim` of the
    head's dimensions are rotated, the others are copied. Pairs are (2i, 2i + 1) if interleaved, else (i, i + dim / 2).
    """
    cos, sin = table[positions].unsqueeze(1).chunk(2, dim=-1)
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    dim = 2 * cos.shape[-1]
    rotated, rest = x[..., :dim].float(), x[..., dim:]
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = rotated.chunk(2, dim=-1)
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((rotated.to(x.dtype), rest), dim=-1)


def store_kv(k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> None:
    """Write k and v [tokens, kv_heads, head_dim] to the cache at slots [tokens] int64: block * block_size + offset.

    A token with slot -1 is not stored.
    """
    stored = slots >= 0
    k, v, slots = k[stored], v[stored], slots[stored]
    block, offset = slots // cache.block_size, slots % cache.block_size
    cache.k[block, offset] = k.to(cache.k.dtype)
    cache.v[block, offset] = v.to(cache.v.dtype)


def move_kv(layers: Sequence[LayerCache], moves: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy keys and values of tokens to other slots, in all layers of the groups in `moves`.

    For each group: slots of the sources and of the targets, [n] int64 each. No source is the target of an earlier move.
    Groups that do not grow come last and have no moves.
    """
    size = layers[0].block_size
    places = [[(slots // size, slots % size) for slots in pair] for pair in moves]
    for layer in layers:
        if layer.group >= len(moves):
            continue
        source, target = places[layer.group]
        is_latent = layer.v.data_ptr() == layer.k.data_ptr()
        for kept in (layer.k,) if is_latent else (layer.k, layer.v):
            # Indexing is not implemented for all types of one byte.
            items = kept.view(torch.uint8) if kept.element_size() == 1 else kept
            items[target] = items[source]


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
    """q [tokens, heads, head_dim] -> [tokens, heads, value_dim], over the keys and values in the rows' block tables.

    Query head h reads key head h // (heads / kv_heads). A token at position p sees positions 0 to p, with a window w
    only p - w + 1 to p. slopes [heads] float32 adds slope * (key position - p) to each score (ALiBi); softcap c turns
    scores s into c * tanh(s / c) before that. sinks [heads] float32 are the scores of a key that each token sees in
    addition, whose value is zero. With `paging.paths` the tokens of a row may be a draft tree: a token sees
    the context and its path, and its position is the length of the context plus its depth.
    """
    out = q.new_empty(*q.shape[:2], cache.v.shape[-1])
    for row, (start, stop) in enumerate(pairwise(paging.host_query_starts)):
        if start == stop:
            continue
        k, v = read_row(cache, paging, row, window)
        query_positions, key_positions, visible = see(paging, row, window, q.device)
        bias = None if slopes is None else slopes.float()[:, None, None] * (key_positions - query_positions[:, None])
        out[start:stop] = attend(q[start:stop], k, v, visible, bias, scale, softcap, sinks)
    return out


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """One row: q [n, heads, dim], k and v [m, kv_heads, dim], visible [n, m], bias [heads, n, m] -> [n, heads, dim]."""
    n, heads, _ = q.shape
    grouped = q.float().view(n, k.shape[1], heads // k.shape[1], -1)
    scores = torch.einsum("nkgd,mkd->kgnm", grouped, k.float()) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.view_as(scores)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[0]]
    return torch.einsum("kgnm,mkd->nkgd", weights, v.float()).reshape(n, heads, -1).to(q.dtype)


def read_row(cache: LayerCache, paging: Paging, row: int, window: int | None) -> tuple[Tensor, Tensor]:
    """The keys and values that a row's tokens may see, [m, kv_heads, dim] each: the context from `first_key` on."""
    first, seq_len, size = first_key(paging, row, window), paging.host_seq_lens[row], paging.block_size
    blocks = paging.block_tables[cache.group][row, first // size : -(-seq_len // size)]
    skip = first % size
    keys = slice(skip, skip + seq_len - first)
    return cache.k[blocks].flatten(0, 1)[keys], cache.v[blocks].flatten(0, 1)[keys]


def first_key(paging: Paging, row: int, window: int | None) -> int:
    """The first position that any of a row's tokens sees. Earlier entries of the block table may be freed blocks."""
    if window is None:
        return 0
    num_queries = paging.host_query_starts[row + 1] - paging.host_query_starts[row]
    return max(0, paging.host_seq_lens[row] - num_queries - window + 1)


def see(paging: Paging, row: int, window: int | None, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of a row's queries [n] and keys [m], and which of the keys each query sees, [n, m] bool."""
    start, stop = paging.host_query_starts[row], paging.host_query_starts[row + 1]
    n = stop - start
    context = paging.host_seq_lens[row] - n
    own = torch.ones(n, n, dtype=torch.bool, device=device).tril()
    if paging.paths is not None and paging.has_tree(row):
        paths = paging.paths[start:stop]
        own = (paths[:, :, None] == torch.arange(n, device=device)).any(1)
    query_positions = context + own.sum(1) - 1
    past = torch.arange(first_key(paging, row, window), context, device=device)
    key_positions = torch.cat((past, query_positions))
    visible = torch.cat((own.new_ones(n, len(past)), own), dim=1)
    if window is not None:
        visible = visible & (key_positions > query_positions[:, None] - window)
    return query_positions, key_positions, visible


def record(model: Any, kv: Sequence[LayerCache], max_tokens: int, tap_layers: Sequence[int] = ()) -> Any:
    """A faster model that is called like `model`, always with the caches `kv` and up to `max_tokens` tokens.

    A backend may record the model's ops once and run them in one call. The reference calls the model itself. With
    `tap_layers`, `taps` of the returned model has the hidden states after these layers, of its last call (`Taps`).
    """
    return TappedModel(model, tap_layers) if tap_layers else model


def logits(products: Tensor, softcap: float | None) -> Tensor:
    """The head's products [n, vocab] -> float32 logits. A soft cap c turns x into c * tanh(x / c)."""
    wide = products.float()
    return wide if softcap is None else softcap * torch.tanh(wide / softcap)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in], weight [out, in] -> x W^T, [..., out]"""
    return functional.linear(x, weight)


def activate(x: Tensor, activation: str) -> Tensor:
    """x [..., size] -> [..., size]: "gelu", "gelu_tanh" (its tanh formula), "relu" or "silu" of each value."""
    wide = x.float()
    if activation == "relu":
        return wide.relu().to(x.dtype)
    if activation == "silu":
        return functional.silu(wide).to(x.dtype)
    formula = {"gelu": "none", "gelu_tanh": "tanh"}[activation]
    return functional.gelu(wide, approximate=formula).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [..., 2 * size], the gate in the first half -> silu(gate) * up, [..., size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (functional.silu(gate.float()) * up.float()).to(gate_up.dtype)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [..., 2 * size], the gate in the first half -> gelu(gate) * up, [..., size], gelu by its tanh formula."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (functional.gelu(gate.float(), approximate="tanh") * up.float()).to(gate_up.dtype)


def apply_token_bitmask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Set tokens whose bit is 0 to minus infinity, in place.

    logits [n, vocab] float32; rows [m] int64; bits [m, bytes] uint8, the lowest bit of a byte first. The bits of
    tokens after the last byte are 0.
    """
    size, numbers = logits.shape[1], torch.arange(8, dtype=torch.uint8, device=bits.device)
    is_banned = (((bits[:, :, None] >> numbers) & 1) == 0).flatten(1)[:, :size]
    is_banned = functional.pad(is_banned, (0, size - is_banned.shape[1]), value=True)
    logits[rows] = logits[rows].masked_fill(is_banned, -torch.inf)


def count_tokens(counts: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """Increment counts[row, token] for rows [n] and tokens [n] int64. Pairs may repeat. counts [rows, vocab] int32"""
    ones = torch.ones_like(tokens, dtype=counts.dtype)
    counts.view(-1).index_add_(0, rows * counts.shape[1] + tokens, ones)


def penalize(logits: Tensor, counts: Tensor, index: Tensor, penalties: Tensor) -> None:
    """Apply repetition, frequency and presence penalties, in place.

    logits [n, vocab] float32; counts [rows, vocab] int32: how often each token occurs in the output, plus IN_PROMPT if
    it occurs in the prompt. index [m, 2 + k] int64: the row of the logits, the row of the counts, and tokens that are
    counted once more (-1 is none). penalties [m, 3] float32: repetition, frequency and presence.
    """
    rows, counted, extra = index[:, 0], counts[index[:, 1]], index[:, 2:]
    counted.scatter_add_(1, extra.clamp(min=0), (extra >= 0).to(counted.dtype))
    repetition, frequency, presence = (penalties[:, column, None] for column in range(3))
    values = logits[rows]
    values = torch.where(counted > 0, torch.where(values > 0, values / repetition, values * repetition), values)
    in_output = counted & (IN_PROMPT - 1)
    values -= frequency * in_output + presence * (in_output > 0)
    logits[rows] = values
