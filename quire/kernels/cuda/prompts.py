"""Rows of many queries through cuDNN, which has the fastest attention there is for keys that lie side by side.

A row's own keys do; those of an earlier context are gathered from their blocks first, and the two results are joined by
their weights. cuDNN makes a plan for every shape it meets, which takes a while, so only whole units are given to it:
under a causal mask a row's first queries need nothing that comes later, and chunks end at units (see `Scheduler`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from quire.kernels.cuda.chain import after_last, chained, let_next
from quire.kernels.paging import LayerCache, Paging

UNIT = 512


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The first `length` queries of neighbouring rows of `stride` tokens each, all with as long a context before."""

    rows: range
    first: int  # token
    stride: int
    length: int
    context: int

    @property
    def num_tokens(self) -> int:
        return len(self.rows) * self.length


def find_prompts(paging: Paging, counts: Sequence[int], *, with_context: bool) -> list[PromptRows]:
    """Neighbours of the same length go together if they have no context."""
    found: list[PromptRows] = []
    for row, count in enumerate(counts):
        context = paging.host_seq_lens[row] - count
        is_served = not context or (with_context and not context % UNIT and not context % paging.block_size)
        if count < UNIT or not is_served:
            continue
        last = found[-1] if found else None
        if last is not None and last.rows.stop == row and last.stride == count and not context and not last.context:
            found[-1] = PromptRows(range(last.rows.start, row + 1), last.first, count, last.length, 0)
        else:
            first = paging.host_query_starts[row]
            found.append(PromptRows(range(row, row + 1), first, count, count // UNIT * UNIT, context))
    return found


@cache
def has_parts(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether cuDNN can be asked for a part of a row's keys, which takes the sums of weights beside the result."""
    q, k = (torch.empty(1, count, UNIT, dim, dtype=dtype, device=device) for count in (heads, kv_heads))
    return bool(can_use_cudnn_attention(SDPAParams(q, k, k, None, 0.0, False, heads != kv_heads)))


def attend_prompts(
    q: Tensor, k: Tensor, v: Tensor, rows: PromptRows, cache: LayerCache, paging: Paging, scale: float
) -> Tensor:
    """q, k, v [tokens, heads, dim] of the step -> the rows' part of what comes out, [rows, length, heads, dim]"""
    q, k, v = (part(x, rows).transpose(1, 2) for x in (q, k, v))
    if not rows.context:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
            return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2)
    blocks = paging.block_tables[cache.group][rows.rows.start, : rows.context // cache.block_size]
    past_k, past_v = (gather(x, blocks).to(q.dtype) for x in (cache.k, cache.v))
    own, own_mass = attend_part(q, k, v, scale, is_causal=True)
    past, past_mass = attend_part(q, past_k, past_v, scale, is_causal=False)
    join(own, own_mass, past, past_mass)
    return own


def part(x: Tensor, rows: PromptRows) -> Tensor:
    """x [tokens, heads, dim] of the step -> that of the rows, [rows, length, heads, dim]"""
    tokens = x[rows.first : rows.first + len(rows.rows) * rows.stride]
    return tokens.view(-1, rows.stride, *x.shape[1:])[:, : rows.length]


def gather(kept: Tensor, blocks: Tensor) -> Tensor:
    """kept [all blocks, kv_heads, block_size, dim] -> the given blocks end to end, [1, kv_heads, tokens, dim]"""
    as_bytes = kept.view(torch.uint8) if kept.dtype.itemsize == 1 else kept  # torch selects fp8 by its bits only
    chosen = torch.index_select(as_bytes.transpose(0, 1), 1, blocks)
    return chosen.flatten(1, 2).unsqueeze(0).view(kept.dtype)


def attend_part(q: Tensor, k: Tensor, v: Tensor, scale: float, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    """q [1, heads, queries, dim] -> what comes out of these keys, [1, queries, heads, dim], and the logarithms
    of the sums of weights, [heads, queries] float32."""
    op = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, mass = op(q, k, v, None, True, 0.0, is_causal, False, scale=scale)[:2]
    return out.transpose(1, 2), mass[0, :, :, 0].contiguous()


@triton.jit
def _join(own, own_mass, past, past_mass, num_heads, num_queries, DIM: tl.constexpr, WIDTH: tl.constexpr,
          HEADS: tl.constexpr, CHAINED: tl.constexpr):  # fmt: skip
    let_next(CHAINED)
    after_last(CHAINED)
    query = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, WIDTH)
    is_head = heads < num_heads
    at_mass = heads * num_queries + query
    ours = tl.load(own_mass + at_mass, mask=is_head, other=0.0)
    theirs = tl.load(past_mass + at_mass, mask=is_head, other=0.0)
    share = tl.sigmoid(theirs - ours)[:, None]
    inside = is_head[:, None] & (columns < DIM)[None, :]
    at = (query * num_heads + heads)[:, None] * DIM + columns[None, :]
    a = tl.load(own + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(past + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(own + at, (a + (b - a) * share).to(own.dtype.element_ty), mask=inside)


def join(own: Tensor, own_mass: Tensor, past: Tensor, past_mass: Tensor) -> None:
    """Two parts of the same queries, [1, queries, heads, dim] each, into the first, by the masses of their weights."""
    assert own.is_contiguous()
    assert past.is_contiguous()
    _, queries, heads, dim = own.shape
    each = min(8, triton.next_power_of_2(heads))
    _join[(queries, triton.cdiv(heads, each))](
        own, own_mass, past, past_mass, heads, queries, DIM=dim, WIDTH=triton.next_power_of_2(dim), HEADS=each,
        num_warps=2, **chained(),
    )  # fmt: skip
