"""The tensor types a GGUF file can name: how many values a block holds, and in how many bytes.

The file reader checks sizes with these numbers. `SUPPORTED_TYPES` are the types that quire can unpack, `PANEL_FORMATS`
those that have a panel format.
"""

from __future__ import annotations

from enum import Enum

from quire.errors import UnsupportedModel


class GGMLType(Enum):
    """name = (number in the file, values in a block, bytes in a block)."""

    F32 = (0, 1, 4)
    F16 = (1, 1, 2)
    Q4_0 = (2, 32, 18)
    Q4_1 = (3, 32, 20)
    Q5_0 = (6, 32, 22)
    Q5_1 = (7, 32, 24)
    Q8_0 = (8, 32, 34)
    Q8_1 = (9, 32, 40)
    Q2_K = (10, 256, 84)
    Q3_K = (11, 256, 110)
    Q4_K = (12, 256, 144)
    Q5_K = (13, 256, 176)
    Q6_K = (14, 256, 210)
    Q8_K = (15, 256, 292)
    IQ2_XXS = (16, 256, 66)
    IQ2_XS = (17, 256, 74)
    IQ3_XXS = (18, 256, 98)
    IQ1_S = (19, 256, 50)
    IQ4_NL = (20, 32, 18)
    IQ3_S = (21, 256, 110)
    IQ2_S = (22, 256, 82)
    IQ4_XS = (23, 256, 136)
    I8 = (24, 1, 1)
    I16 = (25, 1, 2)
    I32 = (26, 1, 4)
    I64 = (27, 1, 8)
    F64 = (28, 1, 8)
    IQ1_M = (29, 256, 56)
    BF16 = (30, 1, 2)
    TQ1_0 = (34, 256, 54)
    TQ2_0 = (35, 256, 66)
    MXFP4 = (39, 32, 17)
    NVFP4 = (40, 64, 36)
    Q1_0 = (41, 128, 18)

    def __init__(self, number: int, block_size: int, type_size: int) -> None:
        self.number = number
        self.block_size = block_size
        self.type_size = type_size

    @property
    def quantized(self) -> bool:
        return self.block_size > 1

    def row_bytes(self, cols: int) -> int:
        """Bytes of a row of `cols` values, which must be whole blocks."""
        assert cols % self.block_size == 0, (self.name, cols)
        return cols // self.block_size * self.type_size


TYPES_BY_NUMBER: dict[int, GGMLType] = {kind.number: kind for kind in GGMLType}

# The panel formats of the C++ kernels that hold a type without loss. Other types become float32.
PANEL_FORMATS: dict[GGMLType, str] = {
    GGMLType.Q4_0: "q4_0",
    GGMLType.Q4_1: "q4_1",
    GGMLType.Q5_0: "q5_0",
    GGMLType.Q5_1: "q5_1",
    GGMLType.Q8_0: "q8_0",
    GGMLType.Q4_K: "q4_k",
    GGMLType.Q5_K: "q5_k",
    GGMLType.Q6_K: "q6_k",
    GGMLType.IQ4_NL: "iq4-g32",
    GGMLType.IQ4_XS: "iq4-g32",
    GGMLType.MXFP4: "mxfp4x2-g32",
    GGMLType.F32: "f32",
    GGMLType.BF16: "bf16",
    GGMLType.F16: "f16",
}

# The types that quire reads. `unpack.py` has their formulas in torch, `csrc/dequantize.cpp` in C++.
SUPPORTED_TYPES = frozenset({*PANEL_FORMATS, GGMLType.Q2_K, GGMLType.Q3_K})


def check_supported(type: GGMLType) -> None:
    """Refuse tensor types that quire cannot unpack."""
    if type not in SUPPORTED_TYPES:
        known = ", ".join(kind.name for kind in GGMLType if kind in SUPPORTED_TYPES)
        raise UnsupportedModel(f"Tensors of type {type.name} are not supported; quire reads {known}.")
