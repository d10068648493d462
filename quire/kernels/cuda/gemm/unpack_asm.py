"""Codes become numbers in registers, by inline PTX: two numbers an instruction.

A word of four bytes becomes the values that a thread holds of one or two steps of the tensor core. `tiled.py` gives
them their place in the matrix. The simulated GPU of the tests replaces the functions of this file.
"""

from __future__ import annotations

import struct
from functools import cache

import triton
import triton.language as tl

BASES = {"bfloat16": 128, "float16": 1024}  # numbers whose low bits may be a code
BASE_BITS = {"bfloat16": 0x4300, "float16": 0x6400}
ONE = {"bfloat16": 0x3F80, "float16": 0x3C00}
AND_OR, AND_XOR = 0xEA, 0x6A  # lop3: (a & b) | c, (a & b) ^ c


def twice(half: int) -> str:
    return f"0x{half << 16 | half:08x}"


@cache
def nibble_asm(dtype: str, zero: int | None) -> str:
    """Of whole numbers: base + code, because the code is the low bits of the base. With a zero that all codes share,
    code - zero."""
    lines = ["{ .reg .b32 w, one, minus;"]
    if zero is not None:
        lines += [f"mov.b32 one, {twice(ONE[dtype])};", f"mov.b32 minus, {twice(0x8000 | BASE_BITS[dtype] | zero)};"]
    for index in range(4):
        target = f"${index}" if zero is None else "w"
        lines.append(f"shr.u32 w, $4, {4 * index};" if index else "mov.b32 w, $4;")
        lines.append(f"lop3.b32 {target}, w, 0x000f000f, {twice(BASE_BITS[dtype])}, {AND_OR};")
        if zero is not None:
            lines.append(f"fma.rn.{'bf16x2' if dtype == 'bfloat16' else 'f16x2'} ${index}, w, one, minus;")
    return "\n".join([*lines, "}"])


def bits_of(number: float, dtype: str) -> int:
    """Of the nearest number of 16 bits. Without torch, which the processes that compile do not load."""
    if dtype == "float16":
        return int.from_bytes(struct.pack("<e", number), "little")
    bits = int.from_bytes(struct.pack("<f", number), "little")
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


@cache
def table_asm(table: tuple[float, ...], dtype: str) -> str:
    """A look-up of each nibble in 16 numbers: their low and their high bytes are looked up apart."""
    numbers = [bits_of(number, dtype) for number in table]
    lines = ["{ .reg .b32 s, p, a, b, l, h, w;"]
    for half in (0, 1):
        lines.append(f"shr.u32 w, $4, {16 * half};" if half else "mov.b32 w, $4;")
        lines += ["and.b32 s, w, 0x7777;", "shr.u32 p, w, 1;", f"lop3.b32 p, p, 0x4444, 0x3210, {AND_OR};"]
        for target, shift in (("l", 0), ("h", 8)):
            words = [
                sum((numbers[4 * word + place] >> shift & 255) << 8 * place for place in range(4)) for word in range(4)
            ]
            lines += [
                f"prmt.b32 a, 0x{words[0]:08x}, 0x{words[1]:08x}, s;",
                f"prmt.b32 b, 0x{words[2]:08x}, 0x{words[3]:08x}, s;",
                f"prmt.b32 {target}, a, b, p;",
            ]
        lines += [f"prmt.b32 ${2 * half}, l, h, 0x5140;", f"prmt.b32 ${2 * half + 1}, l, h, 0x7362;"]
    return "\n".join([*lines, "}"])


@cache
def byte_asm(dtype: str) -> str:
    """Of bytes in two's complement."""
    lines = ["{ .reg .b32 w, t, s, c;", "shr.u32 w, $2, 8;"]
    lines.append(f"mov.b32 c, {twice(0xE480 if dtype == 'float16' else 0x3F80)};")
    for index, word in enumerate(("$2", "w")):
        if dtype == "float16":
            lines.append(f"lop3.b32 t, {word}, 0x00ff00ff, {twice(0x6480)}, {AND_XOR};")
            lines.append(f"add.rn.f16x2 ${index}, t, c;")
        else:
            lines.append(f"lop3.b32 t, {word}, 0x007f007f, {twice(0x4300)}, {AND_OR};")
            lines.append(f"lop3.b32 s, {word}, 0x00800080, {twice(0xC300)}, {AND_OR};")
            lines.append(f"fma.rn.bf16x2 ${index}, t, c, s;")
    return "\n".join([*lines, "}"])


@cache
def float8_asm(dtype: str) -> str:
    """Of e4m3: the bits are moved to their place, and a product corrects the exponent."""
    shift, mask, power = {"bfloat16": (4, 0x07F0, 0x7B80), "float16": (1, 0x3F80, 0x5C00)}[dtype]
    lines = ["{ .reg .b32 a, t, c, zero;", f"mov.b32 c, {twice(power)};", f"mov.b32 zero, {twice(0x8000)};"]
    for index in (0, 1):  # the lower bytes of both halves, the upper bytes
        up = "shl.b32 a, $2, 8;" if index == 0 else "mov.b32 a, $2;"
        lines += [up, f"shr.u32 t, a, {shift};", f"and.b32 t, t, {twice(mask)};"]
        lines.append(f"lop3.b32 t, a, 0x80008000, t, {AND_OR};")
        lines.append(f"fma.rn.bf16x2 ${index}, t, c, zero;" if dtype == "bfloat16" else f"mul.rn.f16x2 ${index}, t, c;")
    return "\n".join([*lines, "}"])


@triton.jit
def unpack_nibbles(words, ASM: tl.constexpr):
    """Words of eight codes -> four tensors of pairs of 16-bit numbers."""
    return tl.inline_asm_elementwise(
        ASM, "=r,=r,=r,=r,r", [words], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
    )


@triton.jit
def unpack_bytes(words, ASM: tl.constexpr):
    """Words of four codes -> two tensors of pairs of 16-bit numbers."""
    return tl.inline_asm_elementwise(ASM, "=r,=r,r", [words], dtype=(tl.int32, tl.int32), is_pure=True, pack=1)


@triton.jit
def prefetch_line(pointers):
    """Starts to read lines of 128 bytes into the second cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip
