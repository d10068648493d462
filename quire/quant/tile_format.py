"""TileFormat: how a matrix of codes is stored for the GPU's tensor cores, and the order of its codes.

A tile has 64 outputs and `chunk` inputs and is contiguous. Each of its rows is words of four bytes, in the order
[thread, word]: thread t of four holds the inputs 8h + 2t + i of a step of the tensor core, which has 16 inputs (h and i
are 0 or 1). A word has 8 codes of 4 bits, of two steps, or 4 codes of 8 bits, of one step. `tile_packing.py` packs, and
`kernels/cuda/gemm/tiled.py` multiplies. This module loads no torch, for the processes that compile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.quant.code_format import IQ4, NF4, CodeFormat
from quire.quant.ggml_types import GGMLType

TILE_OUTPUTS = 64
MAX_CHUNK = 128
STEP = 16  # inputs of one instruction of a tensor core
SCALE_BYTES = {"f16": 2, "bf16": 2, "f32": 4}
ROUNDED_GROUPS = (128, 64, 32)  # inputs that share a scale, the largest that divides the inputs
DOUBLED_E2M1 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0)


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

    def nbytes(self, rows: int, cols: int) -> int:
        """Bytes in memory of a matrix."""
        rows = -(-rows // TILE_OUTPUTS) * TILE_OUTPUTS
        groups, sides = self.num_groups(cols), 1 + self.has_minimums
        if self.supers:
            scales = rows * groups * sides + 2 * rows * -(-groups // self.supers) * sides
        else:
            scales = rows * groups * sides * SCALE_BYTES[self.scale]
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


def rounded_tile_format(name: str, cols: int) -> TileFormat | None:
    """Tiles for a plain matrix that is rounded while it is loaded. None: its columns are no whole groups."""
    if cols % 16:
        return None
    row = -(-cols // MAX_CHUNK) * MAX_CHUNK  # one scale an output
    if name == "int8":
        return TileFormat("uint", 8, row, MAX_CHUNK, "f32", zero=128)
    if name == "fp8":
        return TileFormat("e4m3", 8, row, MAX_CHUNK, "f32")
    group = next((group for group in ROUNDED_GROUPS if cols % group == 0 and (name == "int4" or group <= 64)), None)
    if group is None:
        return None
    if name == "nf4":
        return TileFormat("table", 4, group, group, "f16", table=NF4)
    return TileFormat("uint", 4, group, group, "f16", has_zeros=True)


# Codes of more than 4 bits are moved so that 128 stands for zero, which the kernels subtract without a cost.
TILE_FORMATS: dict[GGMLType, TileFormat] = {
    GGMLType.Q4_0: TileFormat("uint", 4, 32, 32, "f16", zero=8),
    GGMLType.Q4_1: TileFormat("uint", 4, 32, 32, "f16", has_minimums=True),
    GGMLType.Q5_0: TileFormat("uint", 8, 32, 32, "f16", zero=128),
    GGMLType.Q5_1: TileFormat("uint", 8, 32, 32, "f16", zero=128, has_minimums=True),
    GGMLType.Q8_0: TileFormat("uint", 8, 32, 32, "f16", zero=128),
    GGMLType.Q2_K: TileFormat("uint", 8, 16, 16, "f16", zero=128, has_minimums=True, supers=16),
    GGMLType.Q3_K: TileFormat("uint", 8, 16, 16, "f16", zero=128, supers=16),
    GGMLType.Q4_K: TileFormat("uint", 4, 32, 32, "f16", has_minimums=True, supers=8),
    GGMLType.Q5_K: TileFormat("uint", 8, 32, 32, "f16", zero=128, has_minimums=True, supers=8),
    GGMLType.Q6_K: TileFormat("uint", 8, 16, 16, "f16", zero=128, supers=16),
    GGMLType.IQ4_NL: TileFormat("table", 4, 32, 32, "f16", table=IQ4),
    GGMLType.IQ4_XS: TileFormat("table", 4, 32, 32, "f16", table=IQ4, supers=8),
    GGMLType.MXFP4: TileFormat("table", 4, 32, 32, "bf16", table=DOUBLED_E2M1),
}
