"""Codes in the order of tiles (`tile_format.py`), as plain torch. `tiled.py` calls this while a matrix is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.quant.code_format import e4m3_values
from quire.quant.tile_format import STEP, TILE_OUTPUTS, TileFormat

SCALE_TYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


@dataclass(frozen=True, slots=True)
class TileRows:
    """Some rows of a matrix, on any device. Scales and the like are [rows, groups], factors [rows, super-groups]."""

    codes: Tensor  # [rows, cols] uint8, one code a byte
    scales: Tensor  # of the format's type or a wider one; int8 with super-scales
    zeros: Tensor | None = None  # uint8
    minimums: Tensor | None = None  # as scales
    super_scales: Tensor | None = None  # float16
    super_minimums: Tensor | None = None


def levels(format: TileFormat) -> Tensor:
    """The level of each code: [256] float32, or [16] for 4 bits."""
    if format.codes == "table":
        return torch.tensor(format.table, dtype=torch.float32)
    if format.codes == "e4m3":
        return torch.from_numpy(e4m3_values())
    return torch.arange(1 << format.bits, dtype=torch.float32)


def pack(codes: Tensor, format: TileFormat) -> Tensor:
    """Codes [rows, cols], one a byte, rows a multiple of 64 -> tiles [rows / 64, chunks, 64 * row_bytes]."""
    chunks = format.num_chunks(codes.shape[1])
    codes = torch.nn.functional.pad(codes, (0, chunks * format.chunk - codes.shape[1]))
    tiles = len(codes) // TILE_OUTPUTS
    if format.bits == 8:
        if format.codes == "uint":
            codes = codes ^ 128  # two's complement, less 128
        parts = codes.view(tiles, TILE_OUTPUTS, chunks, format.chunk // STEP, 2, 4, 2)  # tile row chunk step h t i
        return parts.permute(0, 2, 1, 5, 3, 6, 4).reshape(tiles, chunks, -1)
    parts = codes.view(tiles, TILE_OUTPUTS, chunks, format.chunk // (2 * STEP), 2, 2, 4, 2)  # tile row chunk j o h t i
    parts = parts.permute(*PLACES[format.codes])
    return (parts[..., 0] | parts[..., 1] << 4).reshape(tiles, chunks, -1)


# The dimensions (tile, row, chunk, j, o, h, t, i) in the order in which they are stored. The codes of whole numbers are
# unpacked by pairs i that are 16 bits apart, those of tables by pairs that are neighbours.
PLACES = {"uint": (0, 2, 1, 6, 3, 7, 4, 5), "table": (0, 2, 1, 6, 3, 4, 5, 7)}


def unpack(tiles: Tensor, format: TileFormat, cols: int) -> Tensor:
    """The inverse of `pack`."""
    num_tiles, chunks, _ = tiles.shape
    rows = num_tiles * TILE_OUTPUTS
    if format.bits == 8:
        parts = tiles.view(num_tiles, chunks, TILE_OUTPUTS, 4, format.chunk // STEP, 2, 2)
        codes = parts.permute(0, 2, 1, 4, 6, 3, 5).reshape(rows, -1)
        codes = codes ^ 128 if format.codes == "uint" else codes
        return codes[:, :cols]
    both = torch.stack((tiles & 15, tiles >> 4), dim=-1)
    places = PLACES[format.codes]
    sizes = (num_tiles, TILE_OUTPUTS, chunks, format.chunk // (2 * STEP), 2, 2, 4, 2)
    parts = both.view([sizes[place] for place in places])
    inverse = [places.index(place) for place in range(len(places))]
    return parts.permute(inverse).reshape(rows, -1)[:, :cols]
