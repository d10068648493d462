"""Which tiles multiply a matrix of codes, by its size and the number of rows. Measured on an H200, in whole layers."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from quire.kernels.cuda.gemm.tiled import (
    MAX_COUNTERS,
    MAX_PARTIALS,
    MAX_ROWS,
    TILE_OUTPUTS,
    Tile,
    TiledMatrix,
    multiply,
)

PROGRAMS = 132  # multiprocessors of an H200
MANY_ROWS = 256  # from here on it is faster to make weights dense first
ROUND_INPUTS = 128  # of smaller chunks, several are a round of the loop
CHUNKS_IN_SPLIT = 4  # the fewest


def multiplies_codes(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


def few_row_product(
    x: Tensor, matrix: TiledMatrix, activation: str | None = None, *, exact: bool = False
) -> Tensor | None:
    """x [rows, in] W^T from the codes, with an activation gated, or None if it is faster to make W dense first."""
    num_rows = x.shape[0]
    if exact:
        return exact_product(x, matrix)
    if num_rows > MANY_ROWS:
        return None
    return multiply(x, matrix, choose_tile(num_rows, matrix, activation), activation)


def exact_product(x: Tensor, matrix: TiledMatrix) -> Tensor:
    """The inputs of all products are added in the same order: in the same splits, whatever the number of rows. So many
    rows are several launches, as there is room for the sums of some splits only."""
    tile = choose_tile(MAX_ROWS, matrix, None)
    most = x.shape[0]
    if tile.splits > 1:
        num_tiles = triton.cdiv(matrix.num_out, tile.outputs)
        sums = num_tiles * tile.splits * tile.outputs * MAX_ROWS
        most = MAX_ROWS * min(MAX_COUNTERS // num_tiles, MAX_PARTIALS // sums)
    if x.shape[0] <= most:
        return multiply(x, matrix, tile)
    return torch.cat([multiply(part, matrix, tile) for part in torch.split(x, most)])


def choose_tile(num_rows: int, matrix: TiledMatrix, activation: str | None) -> Tile:
    """About eight programs a multiprocessor for up to 32 rows, and four for up to 64."""
    num_tiles = triton.cdiv(matrix.num_out // 2 if activation else matrix.num_out, TILE_OUTPUTS)
    chunks = triton.cdiv(matrix.num_in, matrix.chunk)
    unroll = find_unroll(matrix.chunk, chunks)
    splits = 1
    if num_rows <= MAX_ROWS:
        most = 8 if num_rows <= 32 else 1 if activation else 4
        wanted = (8 if num_rows <= 32 else 4) * PROGRAMS // num_tiles
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
