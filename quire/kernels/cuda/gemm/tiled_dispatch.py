"""Which tiles multiply a matrix of codes, by its size and the number of rows. Measured on an H200, in chains of kernels."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from quire.kernels.cuda.gemm.tiled import MAX_ROWS, TILE_OUTPUTS, Tile, TiledMatrix, multiply

PROGRAMS = 132  # multiprocessors of an H200
MANY_ROWS = 256  # from here on it is faster to make weights dense first
MAX_SPLITS = 8


def multiplies_codes(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


def few_row_product(
    x: Tensor, matrix: TiledMatrix, activation: str | None = None, *, exact: bool = False
) -> Tensor | None:
    """x W^T from the codes, with an activation gated, or None if it is faster to make W dense first."""
    num_rows = x.numel() // matrix.num_in
    if num_rows > MANY_ROWS and not exact:
        return None
    return multiply(x, matrix, choose_tile(MAX_ROWS if exact else num_rows, matrix, activation, exact), activation)


def choose_tile(num_rows: int, matrix: TiledMatrix, activation: str | None, exact: bool = False) -> Tile:
    """With `exact` it must not depend on the number of rows."""
    num_out = matrix.num_out // 2 if activation else matrix.num_out
    num_tiles = triton.cdiv(num_out, TILE_OUTPUTS)
    is_wide = num_rows > 32 and num_tiles % 2 == 0
    if activation is not None or exact or num_rows > MAX_ROWS:
        return Tile(TILE_OUTPUTS, 4, 4, 1)
    outputs = 2 * TILE_OUTPUTS if is_wide else TILE_OUTPUTS
    chunks = triton.cdiv(matrix.num_in, matrix.chunk)
    splits = max(1, min(MAX_SPLITS, 4 * PROGRAMS // triton.cdiv(num_out, outputs), chunks))
    splits = triton.cdiv(chunks, triton.cdiv(chunks, splits))  # none is without inputs
    return Tile(outputs, 8 if is_wide else 4, 4, splits)
