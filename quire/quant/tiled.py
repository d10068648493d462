"""Tiled: a matrix of codes for quire's GPU kernels. Products unpack the codes in registers.

`weights/tiled_source.py` fills it. `tile_format.py` has the order of the codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels.cuda.gemm.tiled import TiledMatrix, dequantize
from quire.kernels.cuda.gemm.tiled_dispatch import few_row_product, multiplies_codes
from quire.quant.dense import argmax_of_products
from quire.quant.tile_format import TILE_OUTPUTS, TileFormat
from quire.quant.tile_packing import SCALE_TYPES, TileRows, levels, pack, unpack

WORKSPACE_VALUES = 1 << 26  # of a matrix, dequantized at a time


@cache
def workspace(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Dequantized weights, for all products of many rows. It never moves: graphs point to it."""
    return torch.empty(WORKSPACE_VALUES, dtype=dtype, device=device)


class Tiled:
    """A matrix [rows, cols]. `order`: column i of the codes belongs to input order[i]. `exact`: a row's product must
    not depend on the other rows."""

    data = None

    def __init__(
        self,
        format: TileFormat,
        shape: tuple[int, int],
        device: str,
        dtype: torch.dtype,
        order: Tensor | None = None,
        *,
        exact: bool = False,
    ) -> None:
        self.format = format
        self.shape = shape
        self.dtype = dtype
        self.order = order
        self.exact = exact
        self.matrix = allocate(format, shape, device)
        if multiplies_codes(dtype):
            workspace(self.matrix.codes.device, dtype)  # allocated before the largest step is measured

    @property
    def nbytes(self) -> int:
        return self.format.nbytes(*self.shape)

    def put(self, first: int, rows: TileRows) -> None:
        """Fill rows from `first` on, a multiple of 64. So is their number, except at the end of the matrix."""
        assert first % TILE_OUTPUTS == 0, first
        matrix, count = self.matrix, len(rows.codes)
        padding = -count % TILE_OUTPUTS
        codes = functional.pad(rows.codes, (0, 0, 0, padding))
        tiles = slice(first // TILE_OUTPUTS, (first + count + padding) // TILE_OUTPUTS)
        matrix.codes[tiles] = pack(codes, self.format).view(torch.int32)
        for plane, values in (
            (matrix.scales, rows.scales), (matrix.zeros, rows.zeros), (matrix.minimums, rows.minimums),
            (matrix.super_scales, rows.super_scales), (matrix.super_minimums, rows.super_minimums),
        ):  # fmt: skip
            assert (plane is None) == (values is None), self.format
            if plane is not None and values is not None:
                plane[:, first : first + count] = values.T

    def matmul(self, x: Tensor) -> Tensor:
        rows = self._ordered(x).view(-1, self.shape[1])
        product = few_row_product(rows, self.matrix, exact=self.exact)
        product = self._dequantized_product(rows) if product is None else product
        return product.view(*x.shape[:-1], self.shape[0])

    def gated(self, x: Tensor, activation: str) -> Tensor | None:
        """activation(gate) * up, of a matrix with the rows of the gate first. None: there is no kernel for this."""
        if self.exact or self.shape[0] % (2 * TILE_OUTPUTS):
            return None
        return few_row_product(self._ordered(x), self.matrix, activation)

    def argmax(self, x: Tensor, rows: Sequence[int]) -> tuple[list[int], list[float]]:
        return argmax_of_products(self, x, rows)

    def rows(self, index: Tensor) -> Tensor:
        out = torch.empty(len(index), self.shape[1], dtype=self.dtype, device=index.device)
        dequantize(self.matrix, out, index=index)
        return out if self.order is None else self._restored(out)

    def dense(self) -> Tensor:
        """Each product and sum is rounded to float32, as the formats define it."""
        matrix, format, (num_rows, cols) = self.matrix, self.format, self.shape
        codes = unpack(matrix.codes.view(torch.uint8), format, cols)[:num_rows]
        values = levels(format).to(codes.device)[codes.int()] - format.zero

        def by_column(plane: Tensor, factors: Tensor | None = None) -> Tensor:
            plane = plane.float()
            if factors is not None:
                plane = plane * factors.float().repeat_interleave(format.supers, 0)[: len(plane)]
            return plane.repeat_interleave(format.group, 0)[:cols, :num_rows].T

        if matrix.zeros is not None:
            values = values - by_column(matrix.zeros)
        values = values * by_column(matrix.scales, matrix.super_scales)
        if matrix.minimums is not None:
            values = values + by_column(matrix.minimums, matrix.super_minimums)
        return values if self.order is None else self._restored(values)

    def _ordered(self, x: Tensor) -> Tensor:
        return x.contiguous() if self.order is None else x.index_select(-1, self.order)

    def _restored(self, values: Tensor) -> Tensor:
        in_order = torch.empty_like(values)
        in_order[:, self.order] = values
        return in_order

    def _dequantized_product(self, x: Tensor) -> Tensor:
        """Of many rows: some outputs of the matrix at a time become dense."""
        num_out, num_in = self.shape
        y = torch.empty(len(x), num_out, dtype=x.dtype, device=x.device)
        step = WORKSPACE_VALUES // num_in // TILE_OUTPUTS * TILE_OUTPUTS
        for first in range(0, num_out, step):
            count = min(step, num_out - first)
            dense = workspace(x.device, x.dtype)[: count * num_in].view(count, num_in)
            dequantize(self.matrix, dense, first)
            torch.mm(x, dense.T, out=y[:, first : first + count])
        return y


def allocate(format: TileFormat, shape: tuple[int, int], device: str) -> TiledMatrix:
    rows, cols = shape
    tiles, groups = -(-rows // TILE_OUTPUTS), format.num_groups(cols)
    padded = tiles * TILE_OUTPUTS

    def plane(count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, padded, dtype=dtype, device=device)  # the padding multiplies nothing that is stored

    scale_type = torch.int8 if format.supers else SCALE_TYPES[format.scale]
    supers = -(-groups // format.supers) if format.supers else 0
    return TiledMatrix(
        codes=torch.empty(
            tiles, format.num_chunks(cols), TILE_OUTPUTS * format.row_bytes // 4, dtype=torch.int32, device=device
        ),
        scales=plane(groups, scale_type),
        zeros=plane(groups, torch.uint8) if format.has_zeros else None,
        minimums=plane(groups, scale_type) if format.has_minimums else None,
        super_scales=plane(supers, torch.float16) if supers else None,
        super_minimums=plane(supers, torch.float16) if supers and format.has_minimums else None,
        levels=None if format.codes == "uint" else levels(format).to(device),
        num_out=rows,
        num_in=cols,
        kind=format.codes,
        bits=format.bits,
        chunk=format.chunk,
        group=format.group,
        zero=format.zero,
        supers=format.supers,
        table=format.table,
    )
