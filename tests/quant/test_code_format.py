"""Codes of quantized files: their values, and panels that keep them bit for bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.kernels.cpu.native import Missing, load
from quire.kernels.cpu.tape import address
from quire.quant.code_format import (
    E2M1,
    FP4,
    IQ4,
    NF4,
    CodeFormat,
    CodeRows,
    dequantize,
    e4m3_values,
    pack_codes,
    panel_format,
)

pytestmark = pytest.mark.cpu

MODULE: Any = load()
built = pytest.mark.skipif(isinstance(MODULE, Missing), reason="the C++ kernels are not built")

Floats = NDArray[np.float32]


def uint(bits: int, group: int, scale: Any = "f16", **options: Any) -> CodeFormat:
    return CodeFormat("uint", bits, group, scale, **options)


FORMATS = {
    "gptq 2": uint(2, 64, has_zeros=True),
    "gptq 3": uint(3, 128, has_zeros=True),
    "gptq 4": uint(4, 128, has_zeros=True),
    "gptq 4, one group a row": uint(4, 192, has_zeros=True),
    "gptq 8": uint(8, 32, has_zeros=True),
    "gptq 2, symmetric": uint(2, 128, zero=2),
    "gptq 3, symmetric": uint(3, 32, zero=4),
    "int4": uint(4, 32, zero=8),
    "int4 bf16": uint(4, 64, "bf16", zero=8),
    "int4 f32": uint(4, 128, "f32", zero=8),
    "int4, another zero": uint(4, 32, zero=7),
    "int4 bf16 with zeros": uint(4, 64, "bf16", has_zeros=True),
    "int4 of 16": uint(4, 16, zero=8),
    "int4 of 48": uint(4, 48, zero=8),
    "int4 of 40": uint(4, 40, zero=8),
    "int4 of 96": uint(4, 96, zero=8),
    "int8": uint(8, 192, "f32", zero=128),
    "int8 bf16": uint(8, 64, "bf16", zero=128),
    "int8 f16": uint(8, 128, "f16", zero=128),
    "int8, another zero": uint(8, 192, "f32", zero=100),
    "mxfp4": CodeFormat("table", 4, 32, "bf16", table=E2M1),
    "nvfp4": CodeFormat("table", 4, 16, "f32", table=E2M1),
    "nf4": CodeFormat("table", 4, 64, "f32", table=NF4),
    "fp4": CodeFormat("table", 4, 64, "f32", table=FP4),
    "iq4": CodeFormat("table", 4, 32, "f32", table=IQ4),
    "another table": CodeFormat("table", 4, 64, "f32", table=tuple(i * 0.3 for i in range(16))),
    "tables a row": CodeFormat("table", 4, 192, "f16", row_tables=True),
    "e4m3": CodeFormat("e4m3", 8, 192, "f32"),
    "e4m3 of 128": CodeFormat("e4m3", 8, 128, "bf16"),
}
each_format = pytest.mark.parametrize("format", FORMATS.values(), ids=list(FORMATS))


def rounded(values: Floats, scale: str) -> Floats:
    if scale == "f16":
        return values.astype(np.float16).astype(np.float32)
    return (values.view(np.uint32) & (0xFFFF0000 if scale == "bf16" else 0xFFFFFFFF)).view(np.float32)


def random_rows(format: CodeFormat, rows: int, cols: int, seed: int = 0) -> CodeRows:
    rng, groups = np.random.default_rng(seed), format.num_groups(cols)
    codes = rng.integers(0, 1 << format.bits, (rows, cols), dtype=np.uint8)
    if format.codes == "e4m3":
        codes[(codes & 127) == 127] = 5
    scales = rounded(rng.uniform(-0.01, 0.02, (rows, groups)).astype(np.float32), format.scale)
    zeros = rng.integers(0, 1 + (1 << format.bits), (rows, groups)).clip(0, 255).astype(np.uint8)
    tables = rounded(rng.standard_normal((rows, 16), np.float32), format.scale)
    if format.row_tables:
        scales[:] = 1
    return CodeRows(codes, scales, zeros if format.has_zeros else None, tables if format.row_tables else None)


def pack(format: CodeFormat, rows: CodeRows, name: str | None = None) -> Any:
    panels = MODULE.Panels(name or panel_format(format, rows.codes.shape[1]), *rows.codes.shape)
    pack_codes(panels, 0, format, rows)
    return panels


def unpack(panels: Any) -> Floats:
    index, out = np.arange(panels.rows), np.empty((panels.rows, panels.cols), np.float32)
    panels.unpack_rows(address(index), panels.rows, address(out))
    return out


def select(rows: CodeRows, chosen: slice) -> CodeRows:
    parts = (rows.codes, rows.scales, rows.zeros, rows.tables)
    return CodeRows(*(None if part is None else part[chosen] for part in parts))  # type: ignore[arg-type]


@each_format
def test_values_are_products_of_scale_and_level(format: CodeFormat) -> None:
    rows = random_rows(format, 5, 192)
    levels, values = format.levels(), dequantize(format, rows)
    for row, col in [(0, 0), (4, 191), (2, 100), (3, 63), (1, 64)]:
        code, group = rows.codes[row, col], col // format.group
        level = levels[code] if rows.tables is None else rows.tables[row, code]
        zero = 0 if rows.zeros is None else rows.zeros[row, group]
        assert values[row, col] == rows.scales[row, group] * np.float32(level - zero)


def test_bytes_are_float8() -> None:
    """Against the definition of OCP's 8-bit floats."""
    values = e4m3_values()
    assert (values[0], values[1], values[8], values[0x38], values[0x7E]) == (0.0, 2.0**-9, 2.0**-6, 1.0, 448.0)
    assert np.isnan(values[[127, 255]]).all()
    assert np.array_equal(values[128:255], -values[:127])
    assert (np.diff(values[:127]) > 0).all()


KINDS = {
    "gptq 2": "int2z-g64", "gptq 3": "int3z-g128", "gptq 4": "int4z-g128", "gptq 4, one group a row": "int4z-row",
    "gptq 8": "int8z-g32", "int4": "int4-g32", "int4, another zero": "int4z-g32", "int4 of 16": "f32",
    "int4 of 48": "f32", "int4 of 96": "int4-g32", "int8": "int8-row", "int8, another zero": "int8z-row",
    "mxfp4": "mxfp4-g32", "nvfp4": "nvfp4-g16", "nf4": "nf4-g64", "fp4": "fp4-g64", "iq4": "iq4-g32",
    "another table": "f32", "tables a row": "f16", "e4m3": "fp8-row", "e4m3 of 128": "fp8-g128",
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_formats_have_panels_of_their_own(name: str) -> None:
    assert panel_format(FORMATS[name], 192) == KINDS[name]


@built
@each_format
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_panels_keep_every_bit(format: CodeFormat, rows: int) -> None:
    given = random_rows(format, rows, 192)
    assert np.array_equal(unpack(pack(format, given)), dequantize(format, given))


@built
@each_format
def test_slices_in_any_order_make_the_whole(format: CodeFormat) -> None:
    given = random_rows(format, 100, 192)
    panels = MODULE.Panels(panel_format(format, 192), 100, 192)
    with ThreadPoolExecutor(2) as threads:
        slices = [slice(64, 100), slice(0, 16), slice(16, 64)]
        list(threads.map(lambda rows: pack_codes(panels, rows.start, format, select(given, rows)), slices))
    assert np.array_equal(unpack(panels), dequantize(format, given))


@built
@pytest.mark.parametrize("cols", [1, 31, 33, 100])
def test_columns_that_are_not_whole_blocks(cols: int) -> None:
    format = uint(4, 32, zero=8)
    given = random_rows(format, 20, cols)
    assert np.array_equal(unpack(pack(format, given)), dequantize(format, given))


@built
def test_plain_panels_hold_rounded_values() -> None:
    format = FORMATS["gptq 4"]
    given = random_rows(format, 20, 192)
    expected = dequantize(format, given).astype(np.float16).astype(np.float32)
    assert np.array_equal(unpack(pack(format, given, "f16")), expected)


@built
def test_plain_values_are_rounded_as_other_weights_are() -> None:
    """Groups that no panels have become float32, or what `quantize` makes of plain weights."""
    given, rounded_panels = random_rows(FORMATS["int4 of 48"], 20, 192), MODULE.Panels("q8_0", 20, 192)
    values = dequantize(FORMATS["int4 of 48"], given)
    rounded_panels.pack_dense("f32", address(values), 192, 0, 20)
    assert np.array_equal(unpack(pack(FORMATS["int4 of 48"], given, "q8_0")), unpack(rounded_panels))


@built
@pytest.mark.parametrize("format", [format for format in FORMATS.values() if not format.row_tables])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scales_that_are_not_numbers_are_refused(format: CodeFormat, bad: float) -> None:
    given = random_rows(format, 20, 192)
    given.scales[17, -1] = bad
    with pytest.raises(ValueError, match="row 17 has a scale that is not a finite number"):
        pack(format, given)


@built
@pytest.mark.parametrize("format", [FORMATS["gptq 2"], FORMATS["gptq 3"], FORMATS["int4"], FORMATS["mxfp4"]])
def test_codes_that_do_not_exist_are_refused(format: CodeFormat) -> None:
    given = random_rows(format, 20, 192)
    given.codes[18, 150] = 1 << format.bits
    with pytest.raises(ValueError, match=f"row 18 has code {1 << format.bits}"):
        pack(format, given)


@built
def test_sizes_that_do_not_fit_are_refused() -> None:
    panels, memory = MODULE.Panels("f32", 32, 64), np.zeros(1 << 12, np.float32)
    names = ("codes", "scales", "zeros", "levels", "tables")
    given = dict.fromkeys(names, address(memory)) | {"code_limit": 16, "group": 32}
    for wrong, message in [
        ({"group": 0}, "groups of 0"),
        ({"group": 2**40}, "cannot be packed"),
        ({"code_limit": 257}, "257 codes"),
        ({"codes": 0}, "null"),
        ({"scales": 0}, "null"),
    ]:
        with pytest.raises(ValueError, match=message):
            panels.pack_codes(0, 32, **{**given, **wrong})
    with pytest.raises(IndexError, match="the 32 of the matrix"):
        panels.pack_codes(16, 32, **given)
