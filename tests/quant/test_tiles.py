"""Codes in tiles: what a matrix in tiles stands for equals what its format defines, bit for bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from quire.kernels.cuda.gemm.tiled import MAX_COUNTERS, MAX_PARTIALS
from quire.kernels.cuda.gemm.tiled_dispatch import choose_tile
from quire.quant.code_format import E2M1, FP4, NF4, CodeFormat, CodeRows, dequantize
from quire.quant.ggml_types import SUPPORTED_TYPES, GGMLType
from quire.quant.gguf_blocks import GGUFBlocks
from quire.quant.gguf_codes import tile_rows
from quire.quant.tile_format import TILE_FORMATS, TileFormat, rounded_tile_format, tile_format
from quire.quant.tile_packing import TileRows, pack, unpack
from quire.quant.tile_rounding import NAMES, round_rows
from quire.quant.tiled import Tiled
from quire.weights.tiles import is_fast

pytestmark = pytest.mark.cpu

BLOCK_TYPES = sorted((kind for kind in SUPPORTED_TYPES if kind.quantized), key=lambda kind: kind.number)
FORMATS = [
    CodeFormat("uint", 4, 128, "f16", zero=8),
    CodeFormat("uint", 4, 32, "bf16", has_zeros=True),
    CodeFormat("uint", 4, 96, "f16", zero=8),
    CodeFormat("uint", 4, 16, "f16", zero=3),
    CodeFormat("uint", 3, 64, "f16", has_zeros=True),
    CodeFormat("uint", 2, 1152, "f32", has_zeros=True),
    CodeFormat("uint", 8, 64, "f16", has_zeros=True),
    CodeFormat("uint", 8, 1152, "f32", zero=128),
    CodeFormat("table", 4, 64, "f32", table=NF4),
    CodeFormat("table", 4, 32, "bf16", table=E2M1),
    CodeFormat("table", 4, 32, "f16", table=FP4),
    CodeFormat("e4m3", 8, 1152, "f32"),
    CodeFormat("e4m3", 8, 128, "f32"),
]


def draw(format: CodeFormat, rows: int, cols: int) -> CodeRows:
    rng, groups = np.random.default_rng(0), format.num_groups(cols)
    codes = rng.integers(0, 1 << format.bits, (rows, cols), dtype=np.uint8)
    if format.codes == "e4m3":
        codes[(codes & 127) == 127] = 1  # not a number
    scales = rng.integers(1, 128, (rows, groups)).astype(np.float32) / 1024
    zeros = rng.integers(0, (1 << format.bits) + 1, (rows, groups)).astype(np.uint8) if format.has_zeros else None
    return CodeRows(codes, scales, zeros)


def as_tile_rows(rows: CodeRows, part: slice = slice(None)) -> TileRows:
    zeros = None if rows.zeros is None else torch.from_numpy(rows.zeros[part])
    return TileRows(torch.from_numpy(rows.codes[part]), torch.from_numpy(rows.scales[part]), zeros)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: f"{format.codes}{format.bits}-{format.group}")
@pytest.mark.parametrize(("rows", "cols"), [(64, 192), (200, 1152), (1, 384)])
def test_tiles_hold_what_the_codes_stand_for(format: CodeFormat, rows: int, cols: int) -> None:
    tiles, drawn = tile_format(format, cols), draw(format, rows, cols)
    assert tiles is not None
    weight = Tiled(tiles, (rows, cols), "cpu", torch.float16)
    for first in range(0, rows, 128):
        weight.put(first, as_tile_rows(drawn, slice(first, first + 128)))
    assert np.array_equal(weight.dense().numpy().view(np.uint32), dequantize(format, drawn).view(np.uint32))
    held = [plane for plane in weight.matrix[:6] if plane is not None]
    assert weight.nbytes == sum(plane.nbytes for plane in held)


def test_an_order_of_inputs_is_undone() -> None:
    format, order = FORMATS[0], torch.from_numpy(np.random.default_rng(1).permutation(256))
    tiles, drawn = tile_format(format, 256), draw(format, 64, 256)
    assert tiles is not None
    weight = Tiled(tiles, (64, 256), "cpu", torch.float16, order)
    weight.put(0, as_tile_rows(drawn))
    assert np.array_equal(weight.dense()[:, order].numpy(), dequantize(format, drawn))


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda kind: kind.name)
def test_blocks_of_gguf_files_keep_their_values(kind: GGMLType) -> None:
    data = torch.from_numpy(np.random.default_rng(3).integers(0, 256, (96, kind.row_bytes(512)), dtype=np.uint8))
    weight = Tiled(TILE_FORMATS[kind], (96, 512), "cpu", torch.float16)
    weight.put(0, tile_rows(kind, data))
    got, expected = weight.dense(), GGUFBlocks(kind, data, 512).dense()
    same = (got.view(torch.int32) == expected.view(torch.int32)) | (got.isnan() & expected.isnan())
    same |= (got == 0) & (expected == 0)  # without a sign
    assert same.all(), (~same).sum()
    assert expected.isfinite().float().mean() > 0.5


def test_every_type_that_is_read_has_tiles() -> None:
    assert {*BLOCK_TYPES} == {*TILE_FORMATS}


@pytest.mark.parametrize("kind", ["uint", "table"])
def test_codes_are_where_threads_of_a_tensor_core_look(kind: str) -> None:
    """Against the rule in the docstring, one code at a time."""
    format = TileFormat(kind, 4, 128, 128, "f16")  # type: ignore[arg-type]
    codes = torch.randint(0, 16, (128, 256), dtype=torch.uint8)
    words = pack(codes, format).view(2, 2, 64, 4, 4, 4).numpy()  # tile, chunk, row, thread, word, byte
    rng = np.random.default_rng(0)
    for _ in range(200):
        row, col = int(rng.integers(128)), int(rng.integers(256))
        k = col % 128
        j, o, h, t, i = k // 32, k // 16 % 2, k // 8 % 2, k // 2 % 4, k % 2
        nibble = 4 * i + 2 * o + h if kind == "uint" else 4 * o + 2 * h + i
        byte = int(words[row // 64, col // 128, row % 64, t, j, nibble // 2])
        assert byte >> 4 * (nibble % 2) & 15 == codes[row, col]
    assert torch.equal(unpack(pack(codes, format), format, 256), codes)


@pytest.mark.parametrize("cols", [40, 100])
def test_odd_columns_stay_dense(cols: int) -> None:
    assert tile_format(CodeFormat("uint", 8, cols, "f16", zero=128), cols) is None


def test_codes_whose_products_are_slow_become_dense() -> None:
    fast = [
        CodeFormat("uint", 4, 128, "f16", zero=8),
        CodeFormat("uint", 4, 64, "f16", has_zeros=True),
        CodeFormat("e4m3", 8, 1 << 20, "f32"),
    ]
    slow = [CodeFormat("uint", 4, 32, "f16", zero=8), CodeFormat("table", 4, 64, "f32", table=NF4)]
    formats = [tile_format(format, 256) for format in fast + slow] + [*TILE_FORMATS.values()]
    assert [format is not None and is_fast(format) for format in formats] == [True] * 3 + [False] * (
        2 + len(TILE_FORMATS)
    )


def test_a_table_for_each_row_stays_dense() -> None:
    assert tile_format(CodeFormat("table", 4, 64, "f16", row_tables=True), 64) is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cols", [576, 1024])
def test_rounding_is_to_the_nearest_code(name: str, cols: int) -> None:
    values = torch.randn(64, cols)
    values[3] = 0.0
    values[5] *= 1e-7
    format = rounded_tile_format(name, cols)
    assert format is not None
    weight = Tiled(format, (64, cols), "cpu", torch.bfloat16)
    weight.put(0, round_rows(values, format))
    error = ((weight.dense() - values).square().mean() / values.square().mean()).sqrt()
    assert error < {"int8": 0.012, "fp8": 0.03, "nf4": 0.1, "int4": 0.125}[name]
    assert (weight.dense()[3] == 0).all()
    assert weight.dense().isfinite().all()


SIZES = [
    (out, cols, chunk, num_rows, gated)
    for out in (64, 960, 1000, 3072, 4096, 16896, 28672, 57344, 128256)
    for cols in (64, 576, 1536, 4096, 14336)
    for chunk in (16, 32, 64, 128)
    for num_rows in (1, 17, 33, 64, 65, 256)
    for gated in (False, True)
    if not gated or out % 128 == 0
]


def test_tiles_of_programs_fit_every_size() -> None:
    """What `multiply` asserts: rounds are whole, each split has inputs, and sums fit into the workspace."""
    most = 0
    for out, cols, chunk, num_rows, gated in SIZES:
        matrix: Any = SimpleNamespace(num_out=out, num_in=cols, chunk=chunk)
        tile = choose_tile(num_rows, matrix, "silu" if gated else None)
        chunks, num_tiles = -(-cols // chunk), -(-out // (128 if gated else 64))
        share = -(-chunks // (tile.splits * tile.unroll)) * tile.unroll
        assert chunks % tile.unroll == 0
        assert share * (tile.splits - 1) < chunks
        if tile.splits > 1:
            rows = min(64, max(16, 1 << (num_rows - 1).bit_length()))
            most = max(most, num_tiles * tile.splits * tile.outputs * rows * (2 if gated else 1))
            assert num_tiles <= MAX_COUNTERS
    assert 0 < most <= MAX_PARTIALS
