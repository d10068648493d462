"""Which tiles multiply a matrix of codes, by its size and the number of rows. Measured on an H200, in whole layers."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from quire.kernels.cuda.gemm.tiled import MAX_ROWS, TILE_OUTPUTS, Tile, TiledMatrix, multiply

PROGRAMS = 132  # multiprocessors of an H200
MANY_ROWS = 256  # from here on it is faster to make weights dense first
ROUND_INPUTS = 128  # of smaller chunks, several are a round of the loop
CHUNKS_IN_SPLIT = 4  # the fewest


def multiplies_codes(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


def few_row_product(
    x: Tensor, matrix: TiledMatrix, activation: str | None = None, *, exact: bool = False
) -> Tensor | None:
    """x W^T from the codes, with an activation gated, or None if it is faster to make W dense first."""
    num_rows = x.numel() // matrix.num_in
    if num_rows > MANY_ROWS and not exact:
        return None
    return multiply(x, matrix, choose_tile(num_rows, matrix, activation, exact=exact), activation)


def choose_tile(num_rows: int, matrix: TiledMatrix, activation: str | None, *, exact: bool = False) -> Tile:
    """About five programs a multiprocessor for up to 32 rows, and two and a half for more. With `exact` the inputs of
    all products are added in the same order, whatever their number of rows."""
    num_tiles = triton.cdiv(matrix.num_out // 2 if activation else matrix.num_out, TILE_OUTPUTS)
    chunks = triton.cdiv(matrix.num_in, matrix.chunk)
    unroll = find_unroll(matrix.chunk, chunks)
    splits = 1
    if not exact and num_rows <= MAX_ROWS:
        most = 8 if num_rows <= 32 else 1 if activation else 4
        wanted = 8 * PROGRAMS // num_tiles if num_rows <= 32 else 4 * PROGRAMS // num_tiles
        splits = max(1, min(most, wanted, chunks // (CHUNKS_IN_SPLIT * unroll)))
        share = triton.cdiv(chunks, splits * unroll) * unroll
        splits = triton.cdiv(chunks, share)  # none is without inputs
    return Tile(TILE_OUTPUTS, 4, 3, splits, unroll, prefetches=activation is None and matrix.num_in <= 8192)


def find_unroll(chunk: int, chunks: int) -> int:
    """Chunks in a round: those of 128 inputs, if they are whole rounds."""
    unroll = max(1, ROUND_INPUTS // chunk)
    while chunks % unroll:
        unroll //= 2
    return unroll
