"""Layouts that several methods share: float8 and int8 with scales, and 4-bit floats with scales of small blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
from numpy.typing import NDArray

from quire.layers.source import Shape
from quire.quant.code_format import E2M1, CodeFormat, CodeRows, e4m3_values
from quire.weights.schemes.scheme import FLOAT_SCALES, CodeMatrix, Module, Rows, ScaleType, unpack_nibbles

Floats = NDArray[np.float32]


def shape_in_file(module: Module, kind: str, allowed: Collection[Shape]) -> Shape:
    """The tensor's shape if it is one of the allowed ones, and else the first of these."""
    shapes = list(allowed)
    return module.shape(kind) if module.has(kind) and module.shape(kind) in shapes else shapes[0]


def check_types(module: Module, types: dict[str, Collection[str]]) -> None:
    for kind, allowed in types.items():
        module.fits(kind, (), allowed)


def scales_of(module: Module, kind: str, block: tuple[int, int]) -> Callable[[Rows], Floats]:
    """Reads scales [rows, groups] that are stored for each `block` of outputs and inputs, or one for all."""

    def read(rows: Rows) -> Floats:
        index, stored = np.arange(module.rows)[rows], module.read_floats(kind)
        if stored.size == 1:
            return np.full((len(index), 1), stored.reshape(-1)[0], np.float32)
        scales: Floats = stored.reshape(len(stored), -1)[index // block[0]]
        return np.ascontiguousarray(scales)

    return read


def scale_shape(module: Module, kind: str, block: tuple[int, int] | None) -> Shape:
    """For blocks of outputs and inputs, or with None for an output or for the whole matrix."""
    if block is not None:
        return -(-module.rows // block[0]), -(-module.cols // block[1])
    return shape_in_file(module, kind, [(module.rows, 1), (module.rows,), (1,), (), (1, 1)])


def float8(module: Module, scale: str, block: tuple[int, int] | None) -> CodeMatrix:
    """weight [rows, cols] float8 e4m3, times its scale."""
    check_types(module, {"weight": ("F8_E4M3",), scale: FLOAT_SCALES})
    shape = scale_shape(module, scale, block)
    group = module.cols if block is None else min(block[1], module.cols)
    format, read_scales = (
        CodeFormat("e4m3", 8, group, module.scale_type(scale)),
        scales_of(module, scale, block or (1, 1)),
    )

    def read(rows: Rows) -> CodeRows:
        return CodeRows(np.ascontiguousarray(module.read("weight")[rows]), read_scales(rows))

    tensors = {module.stored_name("weight"): (module.rows, module.cols), module.stored_name(scale): shape}
    return CodeMatrix(tensors, format, read)


def int8(
    module: Module, scale: str, group: int | None, zero: str | None, factor: np.float32 | None = None
) -> CodeMatrix:
    """weight [rows, cols] int8, less its zero, times its scale."""
    check_types(module, {"weight": ("I8",), scale: FLOAT_SCALES})
    block = None if group is None else (1, group)
    shape, cols = scale_shape(module, scale, block), group or module.cols
    module.num_groups(cols)
    tensors = {module.stored_name("weight"): (module.rows, module.cols), module.stored_name(scale): shape}
    if zero is not None:
        check_types(module, {zero: ("I8",)})
        tensors[module.stored_name(zero)] = shape
    read_scales = scales_of(module, scale, (1, 1))
    read_zeros = None if zero is None else scales_of(module, zero, (1, 1))
    has_zeros = zero is not None
    kind: ScaleType = module.scale_type(scale) if factor is None else "f32"
    format = CodeFormat("uint", 8, cols, kind, zero=None if has_zeros else 128, has_zeros=has_zeros)

    def read(rows: Rows) -> CodeRows:
        codes = np.ascontiguousarray(module.read("weight")[rows]).view(np.uint8) ^ np.uint8(128)
        scales = read_scales(rows) if factor is None else read_scales(rows) * factor
        return CodeRows(codes, scales, None if read_zeros is None else (read_zeros(rows) + 128).astype(np.uint8))

    return CodeMatrix(tensors, format, read)


def nvfp4(module: Module, codes: str, scale: str, total: str, *, divide: bool) -> CodeMatrix:
    """4-bit floats, low nibble first; a float8 scale for 16 inputs, times or divided by the matrix's own scale."""
    check_types(module, {codes: ("U8",), scale: ("F8_E4M3",), total: ("F32",)})
    groups = module.num_groups(16)
    tensors = {
        module.stored_name(codes): (module.rows, module.cols // 2),
        module.stored_name(scale): (module.rows, groups),
        module.stored_name(total): shape_in_file(module, total, [(1,), ()]),
    }

    def read(rows: Rows) -> CodeRows:
        own = module.read_floats(total).reshape(-1)[0]
        scales = e4m3_values()[module.read(scale)[rows]]
        return CodeRows(unpack_nibbles(module.read(codes)[rows]), scales / own if divide else scales * own)

    return CodeMatrix(tensors, CodeFormat("table", 4, 16, "f32", table=E2M1), read)


def mxfp4(module: Module, codes: str, scale: str) -> CodeMatrix:
    """4-bit floats, low nibble first; a power of two for 32 inputs."""
    check_types(module, {codes: ("U8",), scale: ("U8", "F8_E8M0")})
    tensors: dict[str, Shape] = {
        module.stored_name(codes): (module.rows, module.cols // 2),
        module.stored_name(scale): (module.rows, module.num_groups(32)),
    }

    def read(rows: Rows) -> CodeRows:
        return CodeRows(unpack_nibbles(module.read(codes)[rows]), e8m0_values()[module.read(scale)[rows]])

    return CodeMatrix(tensors, CodeFormat("table", 4, 32, "bf16", table=E2M1), read)


def e8m0_values() -> Floats:
    """The value of each byte as a power of two. 255 is NaN; 0 is 2^-127."""
    values = np.ldexp(1.0, np.arange(256) - 127)
    values[255] = np.nan
    return values.astype(np.float32)
