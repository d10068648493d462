"""GGUF block types as codes with scales, for tiles: the same numbers as `unpack.py`, not yet multiplied."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.quant.ggml_types import GGMLType
from quire.quant.tile_packing import TileRows
from quire.quant.unpack import (
    bit_planes,
    bits,
    crumbs,
    nibbles,
    scales_of_iq4_xs,
    scales_of_mxfp4,
    scales_of_q3_k,
    six_bits,
)

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
    return TileRows(codes, scales_of_q3_k(blocks), super_scales=float16(blocks, 108))


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
    return TileRows(nibbles(blocks[:, 8:136], 16), scales_of_iq4_xs(blocks), super_scales=float16(blocks, 0))


def read_mxfp4(blocks: Tensor) -> TileRows:
    return TileRows(nibbles(blocks[:, 1:17], 16), scales_of_mxfp4(blocks))


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
