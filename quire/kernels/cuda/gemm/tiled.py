"""Products with matrices of codes, in the order of a tensor core's registers (`quant/tile_format.py`).

A program unpacks codes in registers, into the left operand of the tensor core. Codes are multiplied, not weights: the
sum over the inputs of a chunk is scaled in float32. `multiply` is for few rows, where the read of the codes takes most
of the time, and for exact engines. `dequantize` is for many rows, and for the rows of embeddings.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cuda.activation import gelu, silu
from quire.kernels.cuda.gemm import unpack_asm
from quire.kernels.cuda.gemm.unpack_asm import prefetch_line, unpack_bytes, unpack_nibbles
from quire.kernels.cuda.launch.pdl import launch_dependents, pdl_options, wait_for_previous

TILE_OUTPUTS = 64  # of a stored tile: the rows of a warp group's instruction
MIN_ROWS, MAX_ROWS = 16, 64
MAX_COUNTERS, MAX_PARTIALS = 1056, 1056 * 64 * 64  # split tiles, and their values: what `choose_tile` may ask for
LINE, MAX_LINES = 128, 512  # bytes of a line of the second cache; lines that a program prefetches


class TiledMatrix(NamedTuple):
    """A matrix of codes: value = scale * (level(code) - zero) + minimum. Planes are [groups, outputs, padded to 64].

    With `supers`, scales and minimums are bytes, and each `supers` groups have a float16 factor for them.
    """

    codes: Tensor  # [tiles, chunks, words] int32
    scales: Tensor
    zeros: Tensor | None  # uint8
    minimums: Tensor | None
    super_scales: Tensor | None
    super_minimums: Tensor | None
    levels: Tensor | None  # float32, of codes that are no whole numbers
    num_out: int
    num_in: int
    kind: str  # uint, table, e4m3
    bits: int
    chunk: int
    group: int
    zero: int
    supers: int
    table: tuple[float, ...] | None

    @property
    def planes(self) -> tuple[Tensor, ...]:
        """For the kernels, which do not touch the planes that do not exist."""
        planes = self.codes, self.scales, self.zeros, self.minimums, self.super_scales, self.super_minimums
        return tuple(self.scales if plane is None else plane for plane in planes)


@triton.jit
def _unpack(words, BITS: tl.constexpr, ASM: tl.constexpr, DTYPE: tl.constexpr, CHUNK: tl.constexpr):
    """words [outputs, words of a row] -> [outputs, CHUNK], without a move between threads."""
    OUTPUTS: tl.constexpr = words.shape[0]
    if BITS == 4:
        first, second, third, fourth = unpack_nibbles(words, ASM)
        pairs = tl.join(tl.join(first, second), tl.join(third, fourth))  # row, word, h, o
    else:
        first, second = unpack_bytes(words, ASM)
        pairs = tl.join(first, second)  # row, word, h
    low = pairs.to(tl.int16).to(DTYPE, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    if BITS == 4:
        values = tl.reshape(tl.join(low, high), (OUTPUTS, 4, CHUNK // 32, 2, 2, 2))  # row, t, j, h, o, i
        values = tl.permute(values, (0, 2, 4, 3, 1, 5))
    else:
        values = tl.reshape(tl.join(low, high), (OUTPUTS, 4, CHUNK // 16, 2, 2))  # row, t, step, h, i
        values = tl.permute(values, (0, 2, 3, 1, 4))
    return tl.reshape(values, (OUTPUTS, CHUNK))


@triton.jit
def _groups(
    scales, zeros, minimums, super_scales, super_minimums, first_chunk, last_chunk, chunks_in_group, outputs, stride,
    OFFSET: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_MINIMUMS: tl.constexpr, SUPERS: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Scale, zero and minimum of the outputs, of `COUNT` chunks one after the other."""
    found = ()
    for nth in tl.static_range(COUNT):
        group = tl.minimum(first_chunk + nth, last_chunk - 1) // chunks_in_group
        at = group * stride + outputs
        super_at = group // SUPERS * stride + outputs if SUPERS > 0 else at
        scale = tl.load(scales + at).to(tl.float32)
        zero = tl.zeros_like(scale) + OFFSET
        minimum = tl.zeros_like(scale)
        if HAS_ZEROS:
            zero += tl.load(zeros + at).to(tl.float32)
        if HAS_MINIMUMS:
            minimum = tl.load(minimums + at).to(tl.float32)
        if SUPERS > 0:
            scale *= tl.load(super_scales + super_at).to(tl.float32)
            if HAS_MINIMUMS:
                minimum *= tl.load(super_minimums + super_at).to(tl.float32)
        found = found + (scale, zero, minimum)  # type: ignore[assignment]
    return found


@triton.jit
def _add(
    total, words, x_tile, x_sums, scale, zero, minimum, BITS: tl.constexpr, ASM: tl.constexpr,
    SUBTRACTS: tl.constexpr, HAS_MINIMUMS: tl.constexpr,
):  # fmt: skip
    """total + the product of a chunk"""
    sums = tl.dot(_unpack(words, BITS, ASM, x_tile.dtype, x_tile.shape[0]), x_tile)
    if SUBTRACTS:
        sums -= x_sums * zero[:, None]
    total += sums * scale[:, None]
    if HAS_MINIMUMS:
        total += x_sums * minimum[:, None]
    return total


@triton.jit
def _prefetch_planes(
    scales, zeros, minimums, first_group, last_group, output, stride, LINES: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
):  # fmt: skip
    at = tl.minimum(first_group + tl.arange(0, LINES), last_group) * stride + output
    prefetch_line(scales + at)
    if HAS_ZEROS:
        prefetch_line(zeros + at)
    if HAS_MINIMUMS:
        prefetch_line(minimums + at)


@triton.jit(do_not_specialize=["num_rows"])  # one compilation for all numbers of rows that pad to the same tile
def _tiled(
    x, codes, scales, zeros, minimums, super_scales, super_minimums, y, partials, arrived, num_rows, num_out, num_in,
    stride, chunks_in_group, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr,
    BITS: tl.constexpr, ASM: tl.constexpr, OFFSET: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr, SUPERS: tl.constexpr, IS_GATED: tl.constexpr, IS_SILU: tl.constexpr,
    IS_EVEN: tl.constexpr, UNROLL: tl.constexpr, LINES: tl.constexpr, PLANE_LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    TILE: tl.constexpr = 64
    ROW_WORDS: tl.constexpr = CHUNK * BITS // 32
    TILE_WORDS: tl.constexpr = TILE * ROW_WORDS
    SUBTRACTS: tl.constexpr = HAS_ZEROS or OFFSET != 0
    tile, split = tl.program_id(1), tl.program_id(2)
    num_chunks = tl.cdiv(num_in, CHUNK)
    share = tl.cdiv(num_chunks, SPLITS * UNROLL) * UNROLL
    first_chunk = split * share
    last_chunk = tl.minimum(first_chunk + share, num_chunks)
    offsets = tl.arange(0, OUTPUTS)
    outputs = tile * OUTPUTS + offsets
    row_of_tiles = num_chunks.to(tl.int64) * TILE_WORDS
    begin = codes + tile * (OUTPUTS // TILE) * row_of_tiles
    to_second = num_out // TILE * row_of_tiles
    # Weights and scales are read into the second cache while the kernel before this one computes x.
    if LINES > 0:
        lines = first_chunk * TILE_WORDS + tl.minimum(
            tl.arange(0, LINES) * 32, (last_chunk - first_chunk) * TILE_WORDS - 32
        )
        for part in tl.static_range(OUTPUTS // TILE):
            prefetch_line(begin + part * row_of_tiles + lines)
            if IS_GATED:
                prefetch_line(begin + to_second + part * row_of_tiles + lines)
    if PLANE_LINES > 0:
        first_group, last_group = first_chunk // chunks_in_group, (last_chunk - 1) // chunks_in_group
        for part in tl.static_range(OUTPUTS // TILE):
            output = tile * OUTPUTS + part * TILE
            _prefetch_planes(
                scales, zeros, minimums, first_group, last_group, output, stride, PLANE_LINES, HAS_ZEROS, HAS_MINIMUMS
            )
            if IS_GATED:
                _prefetch_planes(
                    scales, zeros, minimums, first_group, last_group, output + num_out, stride, PLANE_LINES, HAS_ZEROS,
                    HAS_MINIMUMS,
                )  # fmt: skip
    at = begin + (offsets // TILE)[:, None] * row_of_tiles + (offsets % TILE * ROW_WORDS)[:, None]
    at += tl.arange(0, ROW_WORDS)[None, :]
    groups = _groups(
        scales, zeros, minimums, super_scales, super_minimums, first_chunk, last_chunk, chunks_in_group, outputs,
        stride, OFFSET, HAS_ZEROS, HAS_MINIMUMS, SUPERS, UNROLL,
    )  # fmt: skip
    groups_up = groups
    if IS_GATED:
        groups_up = _groups(
            scales, zeros, minimums, super_scales, super_minimums, first_chunk, last_chunk, chunks_in_group,
            outputs + num_out, stride, OFFSET, HAS_ZEROS, HAS_MINIMUMS, SUPERS, UNROLL,
        )  # fmt: skip
    rows, inputs = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, CHUNK)
    is_row = (rows < num_rows)[None, :]
    values = x + rows.to(tl.int64)[None, :] * num_in + inputs[:, None]
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    total_up = tl.zeros([OUTPUTS, ROWS], tl.float32)
    ones = tl.full([OUTPUTS, CHUNK], 1.0, x.dtype.element_ty)
    wait_for_previous(PDL)
    for base in range(first_chunk, last_chunk, UNROLL):
        now, now_up = groups, groups_up
        # The scales of the next round are loaded now, because their use would wait for them.
        groups = _groups(
            scales, zeros, minimums, super_scales, super_minimums, base + UNROLL, last_chunk, chunks_in_group, outputs,
            stride, OFFSET, HAS_ZEROS, HAS_MINIMUMS, SUPERS, UNROLL,
        )  # fmt: skip
        if IS_GATED:
            groups_up = _groups(
                scales, zeros, minimums, super_scales, super_minimums, base + UNROLL, last_chunk, chunks_in_group,
                outputs + num_out, stride, OFFSET, HAS_ZEROS, HAS_MINIMUMS, SUPERS, UNROLL,
            )  # fmt: skip
        for nth in tl.static_range(UNROLL):
            chunk = base + nth
            in_range = is_row if IS_EVEN else is_row & (chunk * CHUNK + inputs < num_in)[:, None]
            x_tile = tl.load(values + chunk * CHUNK, mask=in_range, other=0.0)
            words = tl.load(at + chunk * TILE_WORDS)
            x_sums = total
            if SUBTRACTS or HAS_MINIMUMS:
                x_sums = tl.dot(ones, x_tile)
            total = _add(
                total, words, x_tile, x_sums, now[3 * nth], now[3 * nth + 1], now[3 * nth + 2], BITS, ASM,
                SUBTRACTS, HAS_MINIMUMS,
            )  # fmt: skip
            if IS_GATED:
                words = tl.load(at + to_second + chunk * TILE_WORDS)
                total_up = _add(
                    total_up, words, x_tile, x_sums, now_up[3 * nth], now_up[3 * nth + 1], now_up[3 * nth + 2], BITS,
                    ASM, SUBTRACTS, HAS_MINIMUMS,
                )  # fmt: skip
    is_last = True
    if SPLITS > 1:  # the last program to end adds the sums of all, in order
        counter = tl.program_id(0) * tl.num_programs(1) + tile
        places = offsets[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        own = partials + counter * SPLITS * (1 + IS_GATED) * OUTPUTS * ROWS + places
        tl.store(own + split * OUTPUTS * ROWS, total)
        if IS_GATED:
            tl.store(own + (SPLITS + split) * OUTPUTS * ROWS, total_up)
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived + counter, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            total = tl.zeros([OUTPUTS, ROWS], tl.float32)
            total_up = tl.zeros([OUTPUTS, ROWS], tl.float32)
            for other in tl.static_range(SPLITS):
                total += tl.load(own + other * OUTPUTS * ROWS, cache_modifier=".cg")
                if IS_GATED:
                    total_up += tl.load(own + (SPLITS + other) * OUTPUTS * ROWS, cache_modifier=".cg")
            tl.store(arrived + counter, 0)
    if is_last:
        if IS_GATED:
            gate = total.to(y.dtype.element_ty).to(tl.float32)
            up = total_up.to(y.dtype.element_ty).to(tl.float32)
            total = (silu(gate) if IS_SILU else gelu(gate)) * up
        y_ptrs = y + rows[None, :].to(tl.int64) * num_out + outputs[:, None]
        tl.store(y_ptrs, total.to(y.dtype.element_ty), mask=is_row & (outputs < num_out)[:, None])


@triton.jit
def _dequantize(
    codes, scales, zeros, minimums, super_scales, super_minimums, levels, index, out, first_row, num_rows, num_in,
    stride, group, ROWS: tl.constexpr, COLS: tl.constexpr, CHUNK: tl.constexpr, BITS: tl.constexpr,
    ZERO: tl.constexpr, IS_UINT: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_MINIMUMS: tl.constexpr,
    SUPERS: tl.constexpr, HAS_INDEX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    wait_for_previous(PDL)
    TILE: tl.constexpr = 64
    ROW_WORDS: tl.constexpr = CHUNK * BITS // 32
    nth = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = nth < num_rows
    rows = tl.load(index + nth, mask=is_row, other=0) if HAS_INDEX else first_row.to(tl.int64) + nth
    rows = rows.to(tl.int64)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = is_row[:, None] & (cols < num_in)[None, :]
    num_chunks = tl.cdiv(num_in, CHUNK)
    k = cols % CHUNK  # 16 * step + 8 * h + 2 * t + i
    step, h, t, i = k // 16, k // 8 % 2, k // 2 % 4, k % 2
    if BITS == 4:
        j, o = step // 2, step % 2
        word = t * (CHUNK // 32) + j
        shift = 4 * (4 * i + 2 * o + h if IS_UINT else 4 * o + 2 * h + i)
    else:
        word = t * (CHUNK // 16) + step
        shift = 8 * (2 * i + h)
    tile = (rows // TILE * num_chunks)[:, None] + (cols // CHUNK)[None, :]
    at = codes + tile * (TILE * ROW_WORDS) + (rows % TILE * ROW_WORDS)[:, None] + word[None, :]
    code = (tl.load(at, mask=inside, other=0) >> shift[None, :]) & ((1 << BITS) - 1)
    if IS_UINT:
        value = (code ^ 128 if BITS == 8 else code).to(tl.float32)
    else:
        value = tl.load(levels + code, mask=inside, other=0.0)
    groups = cols // group
    plane = (groups * stride)[None, :] + rows[:, None]
    super_plane = (groups // SUPERS * stride)[None, :] + rows[:, None] if SUPERS > 0 else plane
    value -= ZERO
    if HAS_ZEROS:
        value -= tl.load(zeros + plane, mask=inside, other=0).to(tl.float32)
    scale = tl.load(scales + plane, mask=inside, other=0).to(tl.float32)
    if SUPERS > 0:
        scale *= tl.load(super_scales + super_plane, mask=inside, other=0).to(tl.float32)
    value *= scale
    if HAS_MINIMUMS:
        minimum = tl.load(minimums + plane, mask=inside, other=0).to(tl.float32)
        if SUPERS > 0:
            minimum *= tl.load(super_minimums + super_plane, mask=inside, other=0).to(tl.float32)
        value += minimum
    tl.store(out + nth[:, None].to(tl.int64) * num_in + cols[None, :], value.to(out.dtype.element_ty), mask=inside)


class Tile(NamedTuple):
    """The tile of a program. With split-K, `splits` programs share the inputs, and the last to end adds their sums."""

    outputs: int
    warps: int
    stages: int
    splits: int
    unroll: int = 1  # chunks in a round of the loop
    prefetches: bool = True  # all of the program's weights


@cache
def workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """Partial sums and counters of split tiles, for all products. It never grows or moves: graphs point to it."""
    partials = torch.empty(MAX_PARTIALS, dtype=torch.float32, device=device)
    return partials, torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)


def multiply(x: Tensor, matrix: TiledMatrix, tile: Tile, activation: str | None = None) -> Tensor:
    """x [..., in] W^T. With an activation, the rows of W are gate and up, and the result is activation(gate) * up."""
    assert x.is_contiguous()
    num_rows = x.numel() // matrix.num_in
    num_out = matrix.num_out // 2 if activation else matrix.num_out
    y = torch.empty(*x.shape[:-1], num_out, dtype=x.dtype, device=x.device)
    rows = min(MAX_ROWS, max(MIN_ROWS, triton.next_power_of_2(num_rows)))
    grid = triton.cdiv(num_rows, rows), triton.cdiv(num_out, tile.outputs), tile.splits
    num_chunks = triton.cdiv(matrix.num_in, matrix.chunk)
    share = triton.cdiv(num_chunks, tile.splits * tile.unroll) * tile.unroll
    assert num_chunks % tile.unroll == 0
    assert share * (tile.splits - 1) < num_chunks, "each split has inputs"
    assert num_out % tile.outputs == 0 or (activation is None and tile.outputs == TILE_OUTPUTS)
    if tile.splits > 1:
        assert grid[0] * grid[1] <= MAX_COUNTERS
        assert grid[0] * grid[1] * tile.splits * tile.outputs * rows * (2 if activation else 1) <= MAX_PARTIALS
    tile_bytes = TILE_OUTPUTS * matrix.chunk * matrix.bits // 8
    chunks_in_group = matrix.group // matrix.chunk
    _tiled[grid](
        x, *matrix.planes, y, *workspace(x.device), num_rows, num_out, matrix.num_in, matrix.scales.shape[1],
        chunks_in_group, ROWS=rows, OUTPUTS=tile.outputs, CHUNK=matrix.chunk, SPLITS=tile.splits, BITS=matrix.bits,
        **_asm(matrix, x.dtype), HAS_ZEROS=matrix.zeros is not None, HAS_MINIMUMS=matrix.minimums is not None,
        SUPERS=matrix.supers, IS_GATED=activation is not None, IS_SILU=activation == "silu",
        IS_EVEN=matrix.num_in % matrix.chunk == 0, UNROLL=tile.unroll,
        LINES=power_of_two(share * tile_bytes // LINE, MAX_LINES) if tile.prefetches else 0,
        PLANE_LINES=power_of_two(triton.cdiv(share, chunks_in_group), MAX_LINES), num_warps=tile.warps,
        num_stages=tile.stages, **pdl_options(),
    )  # fmt: skip
    return y


def power_of_two(count: int, most: int) -> int:
    """At least `count`, if that is not too many. Few sizes, so that few kernels are compiled."""
    return min(most, max(32, int(triton.next_power_of_2(count))))


def _asm(matrix: TiledMatrix, dtype: torch.dtype) -> dict[str, Any]:
    """How codes become numbers, and what to subtract from these beside the zeros of groups: ASM and OFFSET."""
    name = str(dtype).removeprefix("torch.")
    if matrix.kind == "table":
        assert matrix.table is not None
        return {"ASM": unpack_asm.table_asm(matrix.table, name), "OFFSET": 0.0}
    if matrix.kind == "e4m3":
        return {"ASM": unpack_asm.float8_asm(name), "OFFSET": 0.0}
    if matrix.bits == 8:
        return {"ASM": unpack_asm.byte_asm(name), "OFFSET": (0 if matrix.zeros is not None else matrix.zero) - 128.0}
    if matrix.zeros is not None:
        return {"ASM": unpack_asm.nibble_asm(name, None), "OFFSET": float(unpack_asm.BASES[name])}
    return {"ASM": unpack_asm.nibble_asm(name, matrix.zero), "OFFSET": 0.0}


def dequantize(matrix: TiledMatrix, out: Tensor, first_row: int = 0, index: Tensor | None = None) -> None:
    """Write the rows from `first_row` on, or those of `index`, to `out` [rows, in]."""
    assert out.is_contiguous()
    rows, cols = 4, 512
    grid = triton.cdiv(len(out), rows), triton.cdiv(matrix.num_in, cols)
    _dequantize[grid](
        *matrix.planes, matrix.scales if matrix.levels is None else matrix.levels,
        matrix.codes if index is None else index, out, first_row, len(out), matrix.num_in, matrix.scales.shape[1],
        matrix.group, ROWS=rows, COLS=cols, CHUNK=matrix.chunk, BITS=matrix.bits, ZERO=float(matrix.zero),
        IS_UINT=matrix.kind == "uint", HAS_ZEROS=matrix.zeros is not None,
        HAS_MINIMUMS=matrix.minimums is not None, SUPERS=matrix.supers, HAS_INDEX=index is not None, num_warps=4,
        **pdl_options(),
    )  # fmt: skip
