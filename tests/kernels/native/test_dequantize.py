"""`dequantize` of the C++ kernels gives the bits of the format's reference implementation."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from quire.quant.ggml_types import GGMLType
from tests.tools.native import MODULE

pytestmark = pytest.mark.cpu

TYPES = [
    GGMLType.F32, GGMLType.F16, GGMLType.BF16, GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q5_0, GGMLType.Q5_1,
    GGMLType.Q8_0, GGMLType.Q2_K, GGMLType.Q3_K, GGMLType.Q4_K, GGMLType.Q5_K, GGMLType.Q6_K,
    GGMLType.IQ4_NL, GGMLType.IQ4_XS, GGMLType.MXFP4,
]  # fmt: skip
each_type = pytest.mark.parametrize("kind", TYPES, ids=[kind.name for kind in TYPES])


def dequantize(kind: GGMLType, data: NDArray[np.uint8], cols: int) -> NDArray[np.float32]:
    """The row after the last one must stay as it is."""
    out = np.full((len(data) + 1, cols), 7.0, np.float32)
    MODULE.dequantize(kind.number, data.ctypes.data, len(data), cols, out.ctypes.data)
    assert (out[-1] == 7).all()
    return out[:-1]


def assert_same_bits(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    """NaN stands for any NaN: which payload survives arithmetic is the processor's choice. Zeros keep their sign."""
    assert actual.shape == expected.shape
    both_nan = np.isnan(actual) & np.isnan(expected)
    same = actual.view(np.uint32) == np.ascontiguousarray(expected).view(np.uint32)
    assert (same | both_nan).all(), np.argwhere(~(same | both_nan))[:4]
    assert both_nan.mean() < 0.5


@each_type
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (7, 1), (24, 3), (300, 2)])
def test_random_bytes_have_the_reference_bits(kind: GGMLType, rows: int, blocks: int) -> None:
    cols = blocks * (kind.block_size if kind.quantized else 17)
    for seed in range(4):
        data = np.random.default_rng(seed).integers(0, 256, (rows, kind.row_bytes(cols)), dtype=np.uint8)
        data[0] = seed  # zeros among them
        with np.errstate(all="ignore"):
            expected = gguf.dequantize(data, gguf.GGMLQuantizationType[kind.name])
        assert_same_bits(dequantize(kind, data, cols), expected)


def test_every_half_and_bfloat_is_converted() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).reshape(4, -1)
    cols = halves.shape[1]
    assert_same_bits(dequantize(GGMLType.F16, halves.view(np.uint8), cols), halves.view(np.float16).astype(np.float32))
    wide = (halves.astype(np.uint32) << 16).view(np.float32)
    assert_same_bits(dequantize(GGMLType.BF16, halves.view(np.uint8), cols), wide)


def test_no_rows_are_no_work() -> None:
    assert dequantize(GGMLType.Q4_K, np.zeros((0, 144), np.uint8), 256).shape == (0, 256)


@pytest.mark.parametrize(
    ("number", "rows", "cols", "message"),
    [
        (9, 1, 32, "GGUF type 9 cannot be dequantized"),
        (99, 1, 32, "GGUF type 99 cannot be dequantized"),
        (12, 1, 255, "blocks of 256"),
        (2, -1, 32, "-1 rows"),
        (0, 1 << 40, 1, "from 0 to"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(number: int, rows: int, cols: int, message: str) -> None:
    out = np.zeros(64, np.float32)
    with pytest.raises(ValueError, match=message):
        MODULE.dequantize(number, out.ctypes.data, rows, cols, out.ctypes.data)


def test_null_addresses_are_refused() -> None:
    out = np.zeros(32, np.float32)
    with pytest.raises(ValueError, match="null"):
        MODULE.dequantize(0, 0, 1, 32, out.ctypes.data)
