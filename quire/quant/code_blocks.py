"""CodeBlocks: a matrix as the codes of a quantized file, in torch, dequantized on use.

Multiplication is slow, but memory use is small. `weights/safetensors_checkpoint.py` makes it for packed models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.quant.code_format import CodeFormat, CodeRows
from quire.quant.dense import argmax_of_products

SLICE_VALUES = 1 << 19  # dequantized at a time: bounds the size of temporaries


class CodeBlocks:
    """A matrix [rows, cols] as codes, two in a byte if they have 4 bits or fewer. `rows` returns `dtype`."""

    data = None

    def __init__(
        self, format: CodeFormat, order: NDArray[np.int64] | None, cols: int, device: str, dtype: torch.dtype
    ) -> None:
        self.format = format
        self.cols = cols
        self.dtype = dtype
        self.device = device
        self.order = None if order is None else torch.from_numpy(order).to(device)
        self.levels = torch.from_numpy(format.levels()).to(device)
        self._slices: list[tuple[Tensor, ...]] = []  # of rows: codes, scales, zeros, tables

    def append(self, rows: CodeRows) -> None:
        """Add rows at the end."""
        rows.check(self.format)
        codes = torch.from_numpy(rows.codes)
        if self.format.bits <= 4:
            padded = torch.nn.functional.pad(codes, (0, self.cols % 2))
            codes = padded[:, ::2] | padded[:, 1::2] << 4
        rest = (rows.scales, rows.zeros, rows.tables)
        empty = torch.empty(len(codes), 0)
        tensors = (codes, *(empty if part is None else torch.from_numpy(part) for part in rest))
        self._slices.append(tuple(tensor.to(self.device) for tensor in tensors))

    def finish(self) -> None:
        """Concatenate the rows."""
        self._slices = [tuple(torch.cat(parts) for parts in zip(*self._slices, strict=True))]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(len(tensors[0]) for tensors in self._slices), self.cols

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensors in self._slices for tensor in tensors)

    def matmul(self, x: Tensor) -> Tensor:
        out = x.new_empty(*x.shape[:-1], self.shape[0])
        for rows in self._row_slices():
            out[..., rows] = torch.nn.functional.linear(x, self._values(rows).to(x.dtype))
        return out

    def argmax(self, x: Tensor, rows: Sequence[int]) -> tuple[list[int], list[float]]:
        return argmax_of_products(self, x, rows)

    def rows(self, index: Tensor) -> Tensor:
        return self._values(index).to(self.dtype)

    def dense(self) -> Tensor:
        return torch.cat([self._values(rows) for rows in self._row_slices()])

    def _row_slices(self) -> Iterator[slice]:
        step, num_rows = max(1, SLICE_VALUES // self.cols), self.shape[0]
        for start in range(0, num_rows, step):
            yield slice(start, min(start + step, num_rows))

    def _values(self, rows: slice | Tensor) -> Tensor:
        """As `code_format.dequantize`, in the order of the inputs."""
        codes, scales, zeros, tables = (tensor[rows] for tensor in self._slices[0])
        if self.format.bits <= 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)[:, : self.cols]
        index = codes.long()
        values = self.levels[index] if not tables.numel() else tables.gather(1, index)
        if zeros.numel():
            values = values - self._by_column(zeros).float()
        values = values * self._by_column(scales)
        if self.order is None:
            return values
        in_order = torch.empty_like(values)
        in_order[:, self.order] = values
        return in_order

    def _by_column(self, groups: Tensor) -> Tensor:
        return groups.repeat_interleave(min(self.format.group, self.cols), dim=1)[:, : self.cols]
