"""GGUFBlocks: a matrix in the quantized blocks of a GGUF file, unpacked on use.

Multiplication is slow, but memory use is small. Loading a dense model uses `dense_into`. `weights/checkpoint.py` reads
the files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from quire.quant.dense import argmax_of_products
from quire.quant.ggml_types import GGMLType, check_supported
from quire.quant.unpack import UNPACKERS

SLICE_VALUES = 1 << 19  # unpacked at a time: bounds the size of temporaries


class GGUFBlocks:
    """A matrix [rows, cols] as uint8 blocks [rows, row_bytes]. `rows` returns `dtype`."""

    data = None

    def __init__(self, type: GGMLType, data: Tensor, cols: int, dtype: torch.dtype = torch.float32) -> None:
        check_supported(type)
        assert data.dtype == torch.uint8, data.dtype
        assert data.shape == (data.shape[0], type.row_bytes(cols)), (data.shape, type, cols)
        self.type = type
        self.blocks = data
        self.cols = cols
        self.dtype = dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks.shape[0], self.cols

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes

    def matmul(self, x: Tensor) -> Tensor:
        out = x.new_empty(*x.shape[:-1], self.shape[0])
        for rows in self._slices():
            out[..., rows] = torch.nn.functional.linear(x, self._unpack(self.blocks[rows]).to(x.dtype))
        return out

    def argmax(self, x: Tensor, rows: Sequence[int]) -> tuple[list[int], list[float]]:
        return argmax_of_products(self, x, rows)

    def rows(self, index: Tensor) -> Tensor:
        return self._unpack(self.blocks[index]).to(self.dtype)

    def dense(self) -> Tensor:
        out = torch.empty(self.shape, dtype=torch.float32, device=self.blocks.device)
        self.dense_into(out)
        return out

    def dense_into(self, out: Tensor) -> None:
        """Unpack into `out` [rows, cols], which may be a slice of a larger tensor, in out's dtype."""
        assert out.shape == self.shape, (out.shape, self.shape)
        direct = out.dtype == torch.float32 and out.is_contiguous()
        for rows in self._slices():
            if direct:
                self._unpack_into(self.blocks[rows], out[rows])
            else:
                out[rows] = self._unpack(self.blocks[rows])

    def _slices(self) -> Iterator[slice]:
        step = max(1, SLICE_VALUES // self.cols)
        for start in range(0, self.shape[0], step):
            yield slice(start, min(start + step, self.shape[0]))

    def _unpack(self, data: Tensor) -> Tensor:
        out = torch.empty(data.shape[0], self.cols, dtype=torch.float32, device=data.device)
        self._unpack_into(data, out)
        return out

    def _unpack_into(self, data: Tensor, out: Tensor) -> None:
        UNPACKERS[self.type](data.reshape(-1, self.type.type_size), out.view(-1, self.type.block_size))
