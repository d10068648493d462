"""GGUF block types as codes with scales, for tiles: the same numbers as `unpack.py`, not yet multiplied.

Codes of more than 4 bits are moved so that 128 stands for zero, which the kernels subtract without a cost.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.quant.code_format import IQ4
from quire.quant.ggml_types import GGMLType
from quire.quant.tile_format import TileFormat, TileRows
from quire.quant.unpack import DOUBLED_E2M1, bit_planes, bits, crumbs, nibbles

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

Read = Callable[[Tensor], TileRows]  # of blocks [n, type_size]; each field of the result is [n, ...]


def tile_rows(type: GGMLType, data: Tensor) -> TileRows:
    """Rows of blocks, [rows, bytes] uint8."""
    read = READERS[type](data.reshape(-1, type.type_size))

    def by_row(field: Tensor | None) -> Tensor | None:
        return None if field is None else field.reshape(len(data), -1)

    return TileRows(
        read.codes.reshape(len(data), -1),
        read.scales.reshape(len(data), -1),
        None,
        *(by_row(field) for field in (read.minimums, read.super_scales, read.super_minimums)),
    )


def float16(blocks: Tensor, offset: int) -> Tensor:
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16)


def read_q4_0(blocks: Tensor) -> TileRows:
    return TileRows(nibbles(blocks[:, 2:18], 16), float16(blocks, 0))


def read_q4_1(blocks: Tensor) -> TileRows:
    return TileRows(nibbles(blocks[:, 4:20], 16), float16(blocks, 0), minimums=float16(blocks, 2))


def read_q5_0(blocks: Tensor) -> TileRows:
    return TileRows((nibbles(blocks[:, 6:22], 16) | bits(blocks[:, 2:6]) << 4) + (128 - 16), float16(blocks, 0))


def read_q5_1(blocks: Tensor) -> TileRows:
    codes = (nibbles(blocks[:, 8:24], 16) | bits(blocks[:, 4:8]) << 4) + 128
    return TileRows(codes, float16(blocks, 0), minimums=float16(blocks, 2))


def read_q8_0(blocks: Tensor) -> TileRows:
    return TileRows(blocks[:, 2:34] ^ 128, float16(blocks, 0))


def read_q2_k(blocks: Tensor) -> TileRows:
    scales, minimums = blocks[:, :16] & 15, blocks[:, :16] >> 4
    return with_factors(crumbs(blocks[:, 16:80]) + 128, scales, minimums, float16(blocks, 80), float16(blocks, 82))


def read_q3_k(blocks: Tensor) -> TileRows:
    codes = (crumbs(blocks[:, 32:96]) | bit_planes(blocks[:, :32]) << 2) + (128 - 4)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device).view(4, 1)
    high = ((blocks[:, 104:108].unsqueeze(1) >> shifts) & 3).flatten(1)
    scales = (nibbles(blocks[:, 96:104], 8) | high << 4).view(torch.int8) - 32
    return TileRows(codes, scales, super_scales=float16(blocks, 108))


def read_q4_k(blocks: Tensor) -> TileRows:
    return with_factors(nibbles(blocks[:, 16:144], 32), *six_bits(blocks), float16(blocks, 0), float16(blocks, 2))


def read_q5_k(blocks: Tensor) -> TileRows:
    codes = (nibbles(blocks[:, 48:176], 32) | bit_planes(blocks[:, 16:48]) << 4) + 128
    return with_factors(codes, *six_bits(blocks), float16(blocks, 0), float16(blocks, 2))


def read_q6_k(blocks: Tensor) -> TileRows:
    codes = (nibbles(blocks[:, :128], 64) | crumbs(blocks[:, 128:192]) << 4) + (128 - 32)
    return TileRows(codes, blocks[:, 192:208].view(torch.int8), super_scales=float16(blocks, 208))


def read_iq4_nl(blocks: Tensor) -> TileRows:
    return TileRows(nibbles(blocks[:, 2:18], 16), float16(blocks, 0))


def read_iq4_xs(blocks: Tensor) -> TileRows:
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=2).flatten(1)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)
    high = ((blocks[:, 2:4].unsqueeze(2) >> shifts) & 3).flatten(1)
    scales = (low | high << 4).view(torch.int8) - 32
    return TileRows(nibbles(blocks[:, 8:136], 16), scales, super_scales=float16(blocks, 0))


def read_mxfp4(blocks: Tensor) -> TileRows:
    exponents = blocks[:, :1].int()
    halves = torch.where(exponents < 2, 0x00200000 << exponents, (exponents - 1) << 23).view(torch.float32)
    return TileRows(nibbles(blocks[:, 1:17], 16), halves)


def six_bits(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The 8 scales and 8 minimums of a Q4_K or Q5_K block, in 12 bytes from byte 4."""
    a, b, c = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    return torch.cat([a & 63, (c & 15) | ((a >> 2) & 48)], dim=1), torch.cat(
        [b & 63, (c >> 4) | ((b >> 2) & 48)], dim=1
    )


def with_factors(codes: Tensor, scales: Tensor, minimums: Tensor, scale: Tensor, minimum: Tensor) -> TileRows:
    """Minimums are subtracted in these types."""
    return TileRows(
        codes, scales.view(torch.int8), minimums=minimums.view(torch.int8), super_scales=scale, super_minimums=-minimum
    )


READERS: dict[GGMLType, Read] = {
    GGMLType.Q4_0: read_q4_0,
    GGMLType.Q4_1: read_q4_1,
    GGMLType.Q5_0: read_q5_0,
    GGMLType.Q5_1: read_q5_1,
    GGMLType.Q8_0: read_q8_0,
    GGMLType.Q2_K: read_q2_k,
    GGMLType.Q3_K: read_q3_k,
    GGMLType.Q4_K: read_q4_k,
    GGMLType.Q5_K: read_q5_k,
    GGMLType.Q6_K: read_q6_k,
    GGMLType.IQ4_NL: read_iq4_nl,
    GGMLType.IQ4_XS: read_iq4_xs,
    GGMLType.MXFP4: read_mxfp4,
}
