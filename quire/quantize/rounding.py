"""Matrices to codes: scales of groups, the nearest codes, and codes that make up for each other's errors (GPTQ).

A grid is value = scale * code + base, one scale and base a value. The loops over values are in C++
(`csrc/fit_groups.cpp`, `csrc/quantize_blocks.cpp`, `csrc/error_feedback.cpp`). Rows are independent there, so threads
do not change results.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.kernels.cpu.native import Native
from quire.kernels.cpu.tape import address
from quire.quant.ggml_types import GGMLType

Floats = NDArray[np.float32]

DAMPING = 0.01  # of the mean of the second moments' diagonal, added to the diagonal
BLOCK = 128  # columns that are rounded before the later ones are corrected
EXACT_COLS = 2048  # second moments of more columns are inverted in float32


@dataclass(frozen=True, slots=True)
class Groups:
    """Scales [rows, groups], and zeros of the same shape. value = scale * (code - zero)."""

    size: int
    low: int
    high: int
    scales: Floats
    zeros: Floats

    def grid(self) -> tuple[Floats, Floats]:
        """The scale and the base of each value."""
        scales = np.repeat(self.scales, self.size, axis=1)
        return scales, -scales * np.repeat(self.zeros, self.size, axis=1)


def in_rows(native: Native, num_rows: int, work: Callable[[int, int], None]) -> None:
    """Call work(start, stop) for slices of the rows, on the threads that there are."""
    step = max(1, -(-num_rows // (4 * native.threads)))
    with ThreadPoolExecutor(native.threads) as pool:
        list(pool.map(lambda start: work(start, min(start + step, num_rows)), range(0, num_rows, step)))


def fit_groups(
    native: Native, values: Floats, size: int, limits: tuple[int, int], importance: Floats | None, *, zeros: bool
) -> Groups:
    """Scales in float16 for which the squared error, weighted by `importance` [cols], is small."""
    rows, cols = values.shape
    values = np.ascontiguousarray(values)
    weights = None if importance is None else np.ascontiguousarray(importance, np.float32)
    scales, zero = np.empty((rows, cols // size), np.float32), np.zeros((rows, cols // size), np.float32)

    def fit(start: int, stop: int) -> None:
        native.module.fit_groups(
            address(values[start:]), stop - start, cols, size, 0 if weights is None else address(weights), *limits,
            address(scales[start:]), address(zero[start:]) if zeros else 0,
        )  # fmt: skip

    in_rows(native, rows, fit)
    return Groups(size, *limits, scales.astype(np.float16).astype(np.float32), zero)


def nearest_codes(values: Floats, groups: Groups) -> Floats:
    """[rows, cols], whole numbers. They include the zero."""
    shape = (len(values), -1, groups.size)
    split = values.reshape(shape)
    scales = groups.scales[:, :, None]
    codes = np.rint(np.divide(split, scales, out=np.zeros_like(split), where=scales != 0))
    codes = np.clip(codes + groups.zeros[:, :, None], groups.low, groups.high)
    return codes.reshape(values.shape)


def round_with_feedback(
    native: Native, values: Floats, grid: tuple[Floats, Floats], limits: tuple[float, float], moments: Floats
) -> Floats:
    """GPTQ's codes [rows, cols]: columns are rounded in the order of their mean squares, and each error is made up for
    by the columns that are left. `moments` [cols, cols] are the sums of products of the inputs."""
    cols = values.shape[1]
    order = np.argsort(-np.diagonal(moments), kind="stable")
    factor = inverse_factor(moments[np.ix_(order, order)])
    left = np.ascontiguousarray(values[:, order])
    scales, bases = (np.ascontiguousarray(each[:, order]) for each in grid)
    codes = np.empty_like(left)
    for start in range(0, cols, BLOCK):
        stop = min(start + BLOCK, cols)
        errors = np.empty((len(left), stop - start), np.float32)

        def feed_back(first: int, last: int, start: int = start, errors: Floats = errors) -> None:
            native.module.quantize_with_feedback(
                last - first, errors.shape[1], cols, address(left[first:, start:]), address(scales[first:, start:]),
                address(bases[first:, start:]), *limits, (address(factor[start:, start:]), cols),
                address(codes[first:, start:]), address(errors[first:]),
            )  # fmt: skip

        in_rows(native, len(left), feed_back)
        left[:, stop:] -= errors @ factor[start:stop, stop:]
    in_order = np.empty_like(codes)
    in_order[:, order] = codes
    return in_order


def inverse_factor(moments: Floats) -> Floats:
    """The upper Cholesky factor of the inverse, [cols, cols]. More damping where the moments are near singular."""
    wide: NDArray[Any] = moments.astype(np.float64) if len(moments) <= EXACT_COLS else moments
    diagonal = np.diagonal(wide)
    mean = float(diagonal.mean()) or 1.0
    damping = DAMPING
    while True:
        damped = wide.copy()
        damped[np.diag_indices_from(damped)] = np.where(diagonal > 0, diagonal, mean) + damping * mean
        try:
            return np.ascontiguousarray(np.linalg.cholesky(np.linalg.inv(damped)).T, np.float32)
        except np.linalg.LinAlgError:
            damping *= 10


def quantize_blocks(native: Native, type: GGMLType, values: Floats, importance: Floats | None) -> NDArray[np.uint8]:
    """Blocks of a GGUF file, [rows, row_bytes]."""
    values = np.ascontiguousarray(values)
    weights = None if importance is None else np.ascontiguousarray(importance, np.float32)
    out = np.empty((len(values), type.row_bytes(values.shape[1])), np.uint8)

    def quantize(start: int, stop: int) -> None:
        native.module.quantize_blocks(
            type.number, address(values[start:]), stop - start, values.shape[1],
            0 if weights is None else address(weights), address(out[start:]),
        )  # fmt: skip

    in_rows(native, len(values), quantize)
    return out


def recode_blocks(
    native: Native, type: GGMLType, blocks: NDArray[np.uint8], values: Floats, moments: Floats
) -> NDArray[np.uint8]:
    """The same blocks with GPTQ's codes in place of the nearest ones. The scales stay."""
    shape = values.shape
    scales, bases, recoded = np.empty(shape, np.float32), np.empty(shape, np.float32), blocks.copy()
    native.module.block_grids(type.number, address(blocks), *shape, address(scales), address(bases))
    limits = native.module.block_code_limits(type.number)
    codes = round_with_feedback(native, values, (scales, bases), limits, moments)
    native.module.write_block_codes(type.number, address(recoded), *shape, address(np.ascontiguousarray(codes)))
    return recoded


def dequantize_blocks(native: Native, type: GGMLType, blocks: NDArray[np.uint8], cols: int) -> Floats:
    values = np.empty((len(blocks), cols), np.float32)
    native.module.dequantize(type.number, address(np.ascontiguousarray(blocks)), *values.shape, address(values))
    return values
