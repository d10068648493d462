"""How each GGUF block type unpacks into float32, as plain torch on any device.

An unpacker takes blocks [n, type_size] uint8 and writes values into out [n, block_size] float32. Products and sums are
rounded one by one, in the order of the format's reference, so the results agree bit for bit. `GGUFBlocks` calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from quire.quant.code_format import IQ4
from quire.quant.ggml_types import GGMLType
from quire.quant.tile_format import DOUBLED_E2M1

Unpacker = Callable[[Tensor, Tensor], None]

# Byte ranges in the unpackers are the fields of a block. Blocks of 256 values are called super-blocks.


def half(blocks: Tensor, offset: int) -> Tensor:
    """The float16 at byte `offset` of each block, as float32 [n, 1]."""
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).float()


def two_halves(blocks: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """The two float16 at byte `offset` of each block, as float32 [n, 1] each."""
    both = blocks[:, offset : offset + 4].contiguous().view(torch.float16).float()
    return both[:, :1], both[:, 1:]


def nibbles(packed: Tensor, run: int) -> Tensor:
    """Two values a byte: the low halves of `run` bytes, then their high halves. [n, bytes] -> [n, 2 * bytes]."""
    n, size = packed.shape
    packed = packed.contiguous().view(n, size // run, run)
    return torch.stack((packed & 15, packed >> 4), dim=2).view(n, 2 * size)


def crumbs(packed: Tensor) -> Tensor:
    """Four values a byte: bits 0-1 of 32 bytes, then bits 2-3 of them, and so on. [n, bytes] -> [n, 4 * bytes]."""
    n, size = packed.shape
    packed = packed.contiguous().view(n, size // 32, 32)
    return torch.stack([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], dim=2).view(n, 4 * size)


def bits(packed: Tensor) -> Tensor:
    """Eight values a byte, lowest bit first, byte by byte: [n, bytes] -> [n, 8 * bytes]."""
    octets = octet_table(packed.device).index_select(0, packed.flatten().int())
    return octets.view(torch.uint8).view(len(packed), -1)


@cache
def octet_table(device: torch.device) -> Tensor:
    """For each byte its bits as eight bytes, in one int64. A look-up is several times faster than shifts."""
    expanded = (torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1
    return expanded.to(torch.uint8).view(torch.int64).view(256).to(device)


def bit_planes(packed: Tensor) -> Tensor:
    """Eight values a byte: bit 0 of all the bytes, then bit 1 of all of them. [n, bytes] -> [n, 8 * bytes]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device).view(8, 1)
    return ((packed.unsqueeze(1) >> shifts) & 1).flatten(1)


def scale_into(out: Tensor, values: Tensor, scales: Tensor, offsets: Tensor | None = None) -> None:
    """out = values * scales (+ offsets). scales [n, runs]: a block is cut into equal runs, with a scale each."""
    n, runs = scales.shape
    out.copy_(values)
    view = out.view(n, runs, -1)
    view.mul_(scales.unsqueeze(-1))
    if offsets is not None:
        view.add_(offsets.unsqueeze(-1))


def unpack_f32(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.contiguous().view(torch.float32))


def unpack_f16(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.contiguous().view(torch.float16))


def unpack_bf16(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.contiguous().view(torch.bfloat16))


def unpack_q4_0(blocks: Tensor, out: Tensor) -> None:
    values = nibbles(blocks[:, 2:18], 16).view(torch.int8).sub_(8)
    scale_into(out, values, half(blocks, 0))


def unpack_q4_1(blocks: Tensor, out: Tensor) -> None:
    scale_into(out, nibbles(blocks[:, 4:20], 16), *two_halves(blocks, 0))


def unpack_q5_0(blocks: Tensor, out: Tensor) -> None:
    values = nibbles(blocks[:, 6:22], 16).bitwise_or_(bits(blocks[:, 2:6]) << 4).view(torch.int8).sub_(16)
    scale_into(out, values, half(blocks, 0))


def unpack_q5_1(blocks: Tensor, out: Tensor) -> None:
    values = nibbles(blocks[:, 8:24], 16).bitwise_or_(bits(blocks[:, 4:8]) << 4)
    scale_into(out, values, *two_halves(blocks, 0))


def unpack_q8_0(blocks: Tensor, out: Tensor) -> None:
    scale_into(out, blocks[:, 2:34].view(torch.int8), half(blocks, 0))


def unpack_q2_k(blocks: Tensor, out: Tensor) -> None:
    scale, offset = two_halves(blocks, 80)
    offsets = (offset * (blocks[:, :16] >> 4)).neg_()
    scale_into(out, crumbs(blocks[:, 16:80]), scale * (blocks[:, :16] & 15), offsets)


def unpack_q3_k(blocks: Tensor, out: Tensor) -> None:
    """Values are 2 bits plus one in a mask whose clear bit means minus 4."""
    values = crumbs(blocks[:, 32:96]).bitwise_or_(bit_planes(blocks[:, :32]) << 2).view(torch.int8).sub_(4)
    scale_into(out, values, half(blocks, 108) * scales_of_q3_k(blocks))


def six_bits(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The 8 scales and 8 offsets of a Q4_K or Q5_K block, as they are stored: 6 bits each, in 12 bytes from byte 4."""
    a, b, c = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([a & 63, (c & 15) | ((a >> 2) & 48)], dim=1)
    return scales, torch.cat([b & 63, (c >> 4) | ((b >> 2) & 48)], dim=1)


def super_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The 8 scales and 8 offsets of a Q4_K or Q5_K block."""
    scales, offsets = six_bits(blocks)
    scale, offset = two_halves(blocks, 0)
    return scale * scales, (offset * offsets).neg_()


def scales_of_iq4_xs(blocks: Tensor) -> Tensor:
    """6 bits, in two fields: 4 of them in nibbles, 2 in a word."""
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=2).flatten(1)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)
    high = ((blocks[:, 2:4].unsqueeze(2) >> shifts) & 3).flatten(1)
    return low.bitwise_or_(high << 4).view(torch.int8).sub_(32)


def scales_of_q3_k(blocks: Tensor) -> Tensor:
    """6 bits, in two fields."""
    low = nibbles(blocks[:, 96:104], 8)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device).view(4, 1)
    high = ((blocks[:, 104:108].unsqueeze(1) >> shifts) & 3).flatten(1)
    return low.bitwise_or_(high << 4).view(torch.int8).sub_(32)


def scales_of_mxfp4(blocks: Tensor) -> Tensor:
    """A power of two, half of it: the table has whole numbers."""
    exponents = blocks[:, :1].int()
    return torch.where(exponents < 2, 0x00200000 << exponents, (exponents - 1) << 23).view(torch.float32)


def unpack_q4_k(blocks: Tensor, out: Tensor) -> None:
    scale_into(out, nibbles(blocks[:, 16:144], 32), *super_scales(blocks))


def unpack_q5_k(blocks: Tensor, out: Tensor) -> None:
    values = nibbles(blocks[:, 48:176], 32).bitwise_or_(bit_planes(blocks[:, 16:48]) << 4)
    scale_into(out, values, *super_scales(blocks))


def unpack_q6_k(blocks: Tensor, out: Tensor) -> None:
    values = nibbles(blocks[:, :128], 64).bitwise_or_(crumbs(blocks[:, 128:192]) << 4).view(torch.int8).sub_(32)
    scale_into(out, values, half(blocks, 208) * blocks[:, 192:208].view(torch.int8))


def look_up(codes: Tensor, table: tuple[float, ...]) -> Tensor:
    return torch.tensor(table, device=codes.device)[codes.long()]


def unpack_iq4_nl(blocks: Tensor, out: Tensor) -> None:
    scale_into(out, look_up(nibbles(blocks[:, 2:18], 16), IQ4), half(blocks, 0))


def unpack_iq4_xs(blocks: Tensor, out: Tensor) -> None:
    scale_into(out, look_up(nibbles(blocks[:, 8:136], 16), IQ4), half(blocks, 0) * scales_of_iq4_xs(blocks))


def unpack_mxfp4(blocks: Tensor, out: Tensor) -> None:
    scale_into(out, look_up(nibbles(blocks[:, 1:17], 16), DOUBLED_E2M1), scales_of_mxfp4(blocks))


UNPACKERS: dict[GGMLType, Unpacker] = {
    GGMLType.F32: unpack_f32,
    GGMLType.F16: unpack_f16,
    GGMLType.BF16: unpack_bf16,
    GGMLType.Q4_0: unpack_q4_0,
    GGMLType.Q4_1: unpack_q4_1,
    GGMLType.Q5_0: unpack_q5_0,
    GGMLType.Q5_1: unpack_q5_1,
    GGMLType.Q8_0: unpack_q8_0,
    GGMLType.Q2_K: unpack_q2_k,
    GGMLType.Q3_K: unpack_q3_k,
    GGMLType.Q4_K: unpack_q4_k,
    GGMLType.Q5_K: unpack_q5_k,
    GGMLType.Q6_K: unpack_q6_k,
    GGMLType.IQ4_NL: unpack_iq4_nl,
    GGMLType.IQ4_XS: unpack_iq4_xs,
    GGMLType.MXFP4: unpack_mxfp4,
}
