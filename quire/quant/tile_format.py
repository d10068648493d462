"""TileFormat: how a matrix of codes is stored for the GPU's tensor cores, and the order of its codes.

A tile has 64 outputs and `chunk` inputs and is contiguous. Each of its rows is words of four bytes, in the order
[thread, word]: thread t of four holds the inputs 8h + 2t + i of a step of the tensor core, which has 16 inputs (h and i
are 0 or 1). A word has 8 codes of 4 bits, of two steps, or 4 codes of 8 bits, of one step. `pack` and `unpack` are plain
torch. `kernels/cuda/gemm/tiled.py` multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quire.quant.code_format import CodeFormat, e4m3_values

TILE_OUTPUTS = 64
MAX_CHUNK = 128
STEP = 16  # inputs of one instruction of a tensor core
SCALE_TYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


@dataclass(frozen=True, slots=True)
class TileFormat:
    """value = scale * (level(code) - zero) + minimum. The level is the code, an entry of a table, or a float8."""

    codes: Literal["uint", "table", "e4m3"]
    bits: Literal[4, 8]
    group: int  # inputs that share a scale; a multiple of `chunk`
    chunk: int  # inputs of a tile: a power of two
    scale: Literal["f16", "bf16", "f32"]
    zero: int = 0  # of all codes
    has_zeros: bool = False  # each group has a zero of its own
    has_minimums: bool = False  # each group has a number that is added
    table: tuple[float, ...] | None = None
    supers: int = 0  # groups that share a float16 factor of their scales and minimums, which are bytes; 0: no factors

    @property
    def row_bytes(self) -> int:
        return self.chunk * self.bits // 8

    @property
    def name(self) -> str:
        kind = {"uint": f"int{self.bits}", "table": "table4", "e4m3": "fp8"}[self.codes]
        extra = "z" if self.has_zeros else "m" if self.has_minimums else ""
        return f"tiled {kind}{extra}"

    def num_groups(self, cols: int) -> int:
        return -(-cols // self.group)

    def num_chunks(self, cols: int) -> int:
        return -(-cols // self.chunk)

    def levels(self) -> Tensor:
        """The level of each code: [256] float32, or [16] for 4 bits."""
        if self.codes == "table":
            return torch.tensor(self.table, dtype=torch.float32)
        if self.codes == "e4m3":
            return torch.from_numpy(e4m3_values())
        return torch.arange(1 << self.bits, dtype=torch.float32)

    def nbytes(self, rows: int, cols: int) -> int:
        """Bytes in memory of a matrix."""
        rows = -(-rows // TILE_OUTPUTS) * TILE_OUTPUTS
        groups, sides = self.num_groups(cols), 1 + self.has_minimums
        if self.supers:
            scales = rows * groups * sides + 2 * rows * -(-groups // self.supers) * sides
        else:
            scales = rows * groups * sides * SCALE_TYPES[self.scale].itemsize
        return rows * self.num_chunks(cols) * self.row_bytes + scales + rows * groups * self.has_zeros


def tile_format(format: CodeFormat, cols: int) -> TileFormat | None:
    """The tiles that hold a matrix of `cols` columns without loss. None: there are no kernels for such codes."""
    group = min(format.group, cols)
    is_row = group == cols
    chunk = MAX_CHUNK if is_row else min(group & -group, MAX_CHUNK)
    bits: Literal[4, 8] = 8 if format.bits == 8 or (chunk < 2 * STEP and format.codes == "uint") else 4
    if format.row_tables or cols % STEP or chunk < (STEP if bits == 8 else 2 * STEP):
        return None
    group = -(-cols // chunk) * chunk if is_row else group
    zero = format.zero or 0
    return TileFormat(format.codes, bits, group, chunk, format.scale, zero, format.has_zeros, table=format.table)


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


@dataclass(frozen=True, slots=True)
class TileRows:
    """Some rows of a matrix, on any device. Scales and the like are [rows, groups], factors [rows, super-groups]."""

    codes: Tensor  # [rows, cols] uint8, one code a byte
    scales: Tensor  # of the format's type or a wider one; int8 with super-scales
    zeros: Tensor | None = None  # uint8
    minimums: Tensor | None = None  # as scales
    super_scales: Tensor | None = None  # float16
    super_minimums: Tensor | None = None
