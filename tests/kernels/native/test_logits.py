"""What the C++ kernels change about logits: the soft cap, bitmasks and token counts, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.kernels.cpu.native_ops import NativeOps
from tests.tools.native import ISAS, MODULE, each_isa, each_thread_count, native_of

pytestmark = pytest.mark.cpu

each_size = pytest.mark.parametrize("size", [1, 15, 16, 17, 1000, 49152, 151_669])
GUARD = np.float32(77.0)
NAN, INF = float("nan"), float("inf")


def padded(rows: int, size: int, seed: int = 0, scale: float = 20.0) -> NDArray[np.float32]:
    """Rows that lie further apart than they are long, with guards in between."""
    whole = np.random.default_rng(seed).normal(0, scale, (rows, size + 5)).astype(np.float32)
    whole[:, size:] = GUARD
    return whole


def ulps(a: NDArray[np.float32], b: NDArray[np.float64]) -> NDArray[np.float64]:
    distance: NDArray[np.float64] = np.abs(a - b) / np.spacing(np.abs(b).astype(np.float32))
    return distance


@each_isa
@each_thread_count
@each_size
@pytest.mark.parametrize("cap", [1.0, 30.0, 50.0])
def test_softcap(name: str, size: int, threads: int, cap: float) -> None:
    whole = padded(3, size)
    whole[1, :size] *= np.float32(1e-4)
    whole[2, :size] *= np.exp(np.random.default_rng(1).uniform(-30, 5, size)).astype(np.float32)
    before = whole[:, :size].copy()
    MODULE.softcap(name, threads, (whole.ctypes.data, size + 5), 3, size, cap)
    scaled = (before / np.float32(cap)).astype(np.float64)  # the argument is rounded, as in float32
    assert ulps(whole[:, :size], cap * np.tanh(scaled)).max() <= 4
    assert (whole[:, size:] == GUARD).all()


@each_isa
def test_softcap_of_special_values(name: str) -> None:
    x = np.array([[INF, -INF, NAN, 0.0, -0.0, 1e30, -1e30, 1e-40]], np.float32)
    MODULE.softcap(name, 1, (x.ctypes.data, 8), 1, 8, 30.0)
    np.testing.assert_array_equal(x[0, :7], [30, -30, NAN, 0, 0, 30, -30])
    assert abs(x[0, 7]) < 1e-39


@each_isa
@each_thread_count
@each_size
def test_token_bitmask(name: str, size: int, threads: int) -> None:
    """Whole masks, masks that are too short, and masks that are longer than the row."""
    rng = np.random.default_rng(size)
    for num_bytes in {0, size // 16, -(-size // 8), size // 8 + 3}:
        whole = padded(5, size)
        whole[3, size // 2] = NAN
        whole[3, size // 3] = INF
        expected = whole.copy()
        bits = rng.integers(0, 256, (3, num_bytes + 2), dtype=np.uint8)
        rows = np.array([3, 0, 3])  # row 3 gets two masks
        for row, mask in zip(rows, bits[:, :num_bytes], strict=True):
            allowed = np.zeros(max(size, 8 * num_bytes), bool)
            allowed[: 8 * num_bytes] = np.unpackbits(mask, bitorder="little")
            expected[row, :size][~allowed[:size]] = -INF
        MODULE.apply_token_bitmask(
            name, threads, (whole.ctypes.data, size + 5), 5, size, rows.ctypes.data, 3,
            (bits.ctypes.data, num_bytes + 2), num_bytes,
        )  # fmt: skip
        np.testing.assert_array_equal(whole, expected)


def test_bitmasks_of_other_rows_are_refused() -> None:
    logits, bits = np.zeros((2, 16), np.float32), np.zeros((1, 2), np.uint8)
    for row in (-1, 2):
        rows = np.array([row])
        with pytest.raises(IndexError, match=f"row {row} is not below 2"):
            MODULE.apply_token_bitmask(
                ISAS[0], 1, (logits.ctypes.data, 16), 2, 16, rows.ctypes.data, 1, (bits.ctypes.data, 2), 2
            )
    assert not logits.any()


def test_tokens_are_counted_as_often_as_they_occur() -> None:
    counts = np.full((3, 40), 5, np.int32)
    rows, tokens = np.array([0, 2, 0, 0, 1]), np.array([3, 0, 3, 36, 3])
    expected = counts.copy()
    np.add.at(expected, (rows, tokens), 1)
    MODULE.count_tokens((counts.ctypes.data, 40), 3, 37, rows.ctypes.data, tokens.ctypes.data, 5)
    assert np.array_equal(counts, expected)
    assert counts[0, 3] == 7


@pytest.mark.parametrize(
    ("row", "token", "message"),
    [(3, 0, "row 3"), (-1, 0, "row -1"), (0, 37, "token 37"), (0, -1, "token -1")],
)
def test_counts_out_of_bounds_change_nothing(row: int, token: int, message: str) -> None:
    counts = np.zeros((3, 40), np.int32)
    rows, tokens = np.array([0, row]), np.array([0, token])
    with pytest.raises(IndexError, match=message):
        MODULE.count_tokens((counts.ctypes.data, 40), 3, 37, rows.ctypes.data, tokens.ctypes.data, 2)
    assert not counts.any()


@pytest.mark.parametrize(
    ("index", "message"),
    [([1, 0, 0], "row 1"), ([0, 2, 0], "row of counts 2"), ([-1, 0, 0], "row -1"), ([0, 0, 64], "token 64")],
)
def test_penalties_out_of_bounds_change_nothing(index: list[int], message: str) -> None:
    logits, counts = np.ones((1, 256), np.float32), np.ones((2, 64), np.int32)
    ops = NativeOps(native_of())
    with pytest.raises(IndexError, match=message):
        ops.penalize(logits[:, :64], counts, np.array([index]), np.full((1, 3), 2.0, np.float32))
    assert (logits == 1).all()
