"""Rows with no earlier context: their keys and values are those of the step itself, and lie side by side.

cuDNN's attention is the fastest there is for those. It makes a plan for every shape it meets, which takes a while, so
only lengths of whole units are given to it: under a causal mask a row's first queries need nothing that comes later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from quire.kernels.paging import Paging

UNIT = 512


@dataclass(frozen=True, slots=True)
class FreshRows:
    """The first `length` queries of neighbouring rows of `stride` tokens each."""

    rows: range
    first: int  # token
    stride: int
    length: int


def find_fresh(paging: Paging, counts: Sequence[int]) -> list[FreshRows]:
    found: list[FreshRows] = []
    for row, count in enumerate(counts):
        if count < UNIT or paging.host_seq_lens[row] != count:
            continue
        last = found[-1] if found else None
        if last is not None and last.rows.stop == row and last.stride == count:
            found[-1] = FreshRows(range(last.rows.start, row + 1), last.first, count, last.length)
        else:
            found.append(FreshRows(range(row, row + 1), paging.host_query_starts[row], count, count // UNIT * UNIT))
    return found


def attend_fresh(q: Tensor, k: Tensor, v: Tensor, rows: FreshRows, out: Tensor, scale: float) -> None:
    """q, k, v [tokens, heads, dim] of the step -> the rows' part of out."""
    tokens = slice(rows.first, rows.first + len(rows.rows) * rows.stride)
    q, k, v, out = (x[tokens].view(-1, rows.stride, *x.shape[1:])[:, : rows.length] for x in (q, k, v, out))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
        result = scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=scale, enable_gqa=True
        )
    out.copy_(result.transpose(1, 2))
