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

    @property
    def num_tokens(self) -> int:
        return len(self.rows) * self.length


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


def attend_fresh(q: Tensor, k: Tensor, v: Tensor, rows: FreshRows, scale: float) -> Tensor:
    """q, k, v [tokens, heads, dim] of the step -> the rows' part of what comes out, [rows, length, heads, dim]"""
    q, k, v = (part(x, rows).transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2)


def part(x: Tensor, rows: FreshRows) -> Tensor:
    """x [tokens, heads, dim] of the step -> that of the rows, [rows, length, heads, dim]"""
    tokens = x[rows.first : rows.first + len(rows.rows) * rows.stride]
    return tokens.view(-1, rows.stride, *x.shape[1:])[:, : rows.length]
