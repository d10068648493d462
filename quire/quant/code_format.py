"""CodeFormat: how a quantized matrix that is not GGUF is stored, without the layout of its file.

A reader of a checkpoint describes a matrix with a `CodeFormat` and hands its rows over as `CodeRows`. `panel_format`
names the panels of the C++ kernels that hold the matrix without loss, and `pack_codes` fills them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quire.kernels.cpu.tape import address

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

TABLE_SIZE = 16
PANEL_BLOCK, HALF_BLOCK, MAX_GROUP = 32, 16, 32 << 15  # columns

# The values of 4-bit codes. Elements of MXFP4 and NVFP4; the normal float and the float of bitsandbytes.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = tuple(
    float(np.float32(sign * value) / np.float32(12.0))
    for sign in (1.0, -1.0)
    for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
)

IQ4 = (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0)
TABLES = {"mxfp4": E2M1, "nf4": NF4, "fp4": FP4, "iq4": IQ4}  # those of csrc/tables.h


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """How codes become values: scale * (code - zero), scale * table[code] or scale * float8(code)."""

    codes: Literal["uint", "table", "e4m3"]
    bits: int  # 2, 3, 4 or 8 ("uint"), 4 ("table"), 8 ("e4m3")
    group: int  # columns that share a scale; the number of columns: one scale a row; the last group may be shorter
    scale: Literal["f16", "bf16", "f32"]  # a type that holds the scales without loss
    zero: int | None = None  # of all codes, from 0 to the largest code; None with `has_zeros`
    has_zeros: bool = False  # each group has a zero of its own, in CodeRows.zeros
    table: tuple[float, ...] | None = None  # 16 float32 values; None with `row_tables`
    row_tables: bool = False  # each row has a table of its own, in CodeRows.tables; `scale` is its type, scales are 1

    def __post_init__(self) -> None:
        assert self.bits in {"uint": (2, 3, 4, 8), "table": (4,), "e4m3": (8,)}[self.codes], self
        assert self.group > 0, self
        if self.codes == "uint":
            assert self.has_zeros == (self.zero is None), self
            assert self.zero is None or 0 <= self.zero < 1 << self.bits, self
        if self.codes == "table":
            assert self.row_tables == (self.table is None), self
            assert self.table is None or len(self.table) == TABLE_SIZE, self

    def num_groups(self, cols: int) -> int:
        return -(-cols // self.group)

    def levels(self) -> Floats:
        """The value of each code before its scale and the zero of its group: [256], 0 for codes that do not exist."""
        levels = np.zeros(256, np.float32)
        if self.codes == "uint":
            count = 1 << self.bits
            levels[:count] = np.arange(count) - (self.zero or 0)
        elif self.codes == "e4m3":
            levels[:] = e4m3_values()
        elif self.table is not None:
            levels[:TABLE_SIZE] = self.table
        return levels


@dataclass(frozen=True, slots=True)
class CodeRows:
    """Some rows of a matrix. A reader makes a few MiB at a time."""

    codes: Bytes  # [rows, cols], one code a byte
    scales: Floats  # [rows, groups], the stored values exactly
    zeros: Bytes | None = None  # [rows, groups]; may be above the largest code
    tables: Floats | None = None  # [rows, 16]

    def check(self, format: CodeFormat) -> None:
        rows, cols = self.codes.shape
        groups = (rows, format.num_groups(cols))
        assert (self.zeros is not None) == format.has_zeros
        assert (self.tables is not None) == format.row_tables
        assert self.codes.dtype == np.uint8
        assert self.scales.dtype == np.float32
        assert self.scales.shape == groups, (self.scales.shape, groups)
        if self.zeros is not None:
            assert self.zeros.dtype == np.uint8
            assert self.zeros.shape == groups, (self.zeros.shape, groups)
        if self.tables is not None:
            assert self.tables.dtype == np.float32
            assert self.tables.shape == (rows, TABLE_SIZE), self.tables.shape
            assert (self.scales == 1).all()


def e4m3_values() -> Floats:
    """The value of each byte as float8 e4m3: a sign, 4 bits of exponent, 3 of mantissa. 127 and 255 are NaN."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * np.exp2(exponent - 10.0))
    value[(byte & 127) == 127] = np.nan
    return np.where(byte < 128, value, -value).astype(np.float32)


def dequantize(format: CodeFormat, rows: CodeRows) -> Floats:
    """The values [rows, cols]. Each is one product, rounded to float32."""
    rows.check(format)
    if rows.tables is not None:
        values = np.take_along_axis(rows.tables, rows.codes.astype(np.intp), axis=1)
    else:
        values = format.levels()[rows.codes]
    if rows.zeros is not None:
        values = values - _by_column(rows.zeros, format, values.shape[1]).astype(np.float32)
    products: Floats = values * _by_column(rows.scales, format, values.shape[1])
    return products


def _by_column(groups: NDArray[Any], format: CodeFormat, cols: int) -> NDArray[Any]:
    return groups.repeat(min(format.group, cols), axis=1)[:, :cols]


def panel_format(format: CodeFormat, cols: int) -> str:
    """The panels of the C++ kernels that hold a matrix of `cols` columns without loss; float32 where no others do."""
    if format.row_tables:
        return format.scale
    kind, group = panel_kind(format), panel_group(format, cols)
    if kind is None or group is None or (cols % PANEL_BLOCK and format.codes != "e4m3"):
        return "f32"
    if group == HALF_BLOCK:
        return "nvfp4-g16" if kind == "mxfp4" else "f32"
    return f"{kind}-row" if group >= cols else f"{kind}-g{group}"


def panel_kind(format: CodeFormat) -> str | None:
    if format.codes == "e4m3":
        return "fp8"
    if format.codes == "table":
        return next((name for name, table in TABLES.items() if format.table == table), None)
    if format.bits in (4, 8) and format.zero == 1 << (format.bits - 1):
        return f"int{format.bits}"
    return f"int{format.bits}z"


def panel_group(format: CodeFormat, cols: int) -> int | None:
    """Columns that share a scale in panels: a power of two that divides the format's, or None if that is too small."""
    if format.group >= cols:
        return cols
    group = min(format.group & -format.group, MAX_GROUP)
    return group if group >= PANEL_BLOCK or format.group == HALF_BLOCK else None


def in_panel_groups(format: CodeFormat, rows: CodeRows, cols: int) -> tuple[CodeFormat, CodeRows]:
    """The same values, with the groups of the panels and with zeros where the panels have them."""
    group = panel_group(format, cols)
    assert group is not None, format
    times = format.group // group if format.group < cols else 1
    zeros = rows.zeros
    if format.codes == "uint" and panel_kind(format) == f"int{format.bits}z" and zeros is None:
        zeros, format = np.full(rows.scales.shape, format.zero, np.uint8), replace(format, zero=None, has_zeros=True)
    if times == 1:
        return format, replace(rows, zeros=zeros)
    num_groups = -(-cols // group)
    scales = rows.scales.repeat(times, axis=1)[:, :num_groups]
    zeros = None if zeros is None else zeros.repeat(times, axis=1)[:, :num_groups]
    return replace(format, group=group), replace(rows, scales=scales, zeros=zeros)


def pack_codes(panels: Any, first: int, format: CodeFormat, rows: CodeRows) -> None:
    """Fill rows from `first` on of the extension's `Panels`, which are of `panel_format` or plain.

    `first` and the number of rows are multiples of 16, except for the last rows of the matrix. Raises ValueError for
    a scale that is not a finite number, and for a code or a zero that the format does not have.
    """
    rows.check(format)
    if "-" in panels.format:  # one with groups
        assert panels.format.partition("-")[0] == panel_format(format, panels.cols).partition("-")[0], panels.format
        format, rows = in_panel_groups(format, rows, panels.cols)
    assert rows.codes.shape[1] == panels.cols, (rows.codes.shape, panels.cols)
    codes, scales, levels = np.ascontiguousarray(rows.codes), np.ascontiguousarray(rows.scales), format.levels()
    zeros = None if rows.zeros is None else np.ascontiguousarray(rows.zeros)
    tables = None if rows.tables is None else np.ascontiguousarray(rows.tables)
    panels.pack_codes(
        first,
        len(codes),
        codes=address(codes),
        code_limit=1 << format.bits,
        group=format.group,
        scales=address(scales),
        zeros=0 if zeros is None else address(zeros),
        levels=address(levels),
        tables=0 if tables is None else address(tables),
    )
