"""Mxfp4Codes: a matrix in MXFP4 for the GPU's kernels of experts, which unpack the codes in registers.

A group of 32 columns shares a scale, a power of two. Columns are stored in chunks of 128: byte j of a chunk has the
codes of column j (the low half) and of column 64 + j. The scales of a chunk's groups are in the order 0, 2, 1, 3: those
of the low halves of the bytes come first. An exponent is at most 128, because the
kernels multiply by a number 2^126 times as large. `weights/dense_source.py` fills it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from quire.quant.code_format import E2M1
from quire.quant.dense import argmax_of_products

GROUP, CHUNK = 32, 128
BIAS = 127  # of a scale's exponent
ORDER = (0, 2, 1, 3)


class Mxfp4Codes:
    """[rows, cols]. `rows` returns `dtype`."""

    data = None

    def __init__(self, num_rows: int, cols: int, device: str, dtype: torch.dtype) -> None:
        chunks = -(-cols // CHUNK)
        self.shape = num_rows, cols
        self.dtype = dtype
        self.codes = torch.zeros(num_rows, chunks * CHUNK // 2, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(num_rows, chunks * CHUNK // GROUP, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def put(self, first: int, codes: Tensor, exponents: Tensor) -> None:
        """Fill rows from `first` on: codes [n, cols], one a byte, and the exponents of the scales, [n, groups]."""
        (num_rows, cols), last = codes.shape, first + len(codes)
        chunks = -(-cols // CHUNK)
        halves = functional.pad(codes, (0, chunks * CHUNK - cols)).view(num_rows, chunks, 2, CHUNK // 2)
        self.codes[first:last] = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1).to(self.codes.device)
        groups = functional.pad(exponents, (0, 4 * chunks - exponents.shape[1])).view(num_rows, chunks, 4)
        self.scales[first:last] = groups[:, :, list(ORDER)].flatten(1).to(self.scales.device)

    def matmul(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.dense().to(x.dtype))

    def argmax(self, x: Tensor, rows: Sequence[int]) -> tuple[list[int], list[float]]:
        return argmax_of_products(self, x, rows)

    def rows(self, index: Tensor) -> Tensor:
        return self._values(index).to(self.dtype)

    def dense(self) -> Tensor:
        return self._values(slice(None))

    def _values(self, rows: slice | Tensor) -> Tensor:
        codes, scales = self.codes[rows], self.scales[rows]
        halves = codes.view(len(codes), -1, CHUNK // 2)
        indices = torch.cat((halves & 15, halves >> 4), dim=-1).long()
        levels = torch.tensor(E2M1, dtype=torch.float32, device=codes.device)
        in_order = scales.view(len(codes), -1, 4)[:, :, list(ORDER)]  # the order is its own inverse
        factors = torch.exp2(in_order.float() - BIAS).repeat_interleave(GROUP, dim=2)
        return (levels[indices] * factors).flatten(1)[:, : self.shape[1]]
