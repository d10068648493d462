"""Blocks and groups: against the gguf package and torch, and codes that make up for each other's errors."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from quire.kernels.cpu.native import Native, find
from quire.kernels.isa import prepare
from quire.quant.ggml_types import GGMLType
from quire.quantize.packing import to_e4m3, to_nf4
from quire.quantize.rounding import (
    Groups,
    dequantize_blocks,
    fit_groups,
    nearest_codes,
    quantize_blocks,
    recode_blocks,
    round_with_feedback,
)

pytestmark = pytest.mark.cpu

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
# The mean square of the error as a share of the values', for normally distributed values.
ERRORS = {"Q2_K": 0.09, "Q3_K": 0.027, "Q4_K": 0.0065, "Q5_K": 0.0016, "Q6_K": 0.0004}


@pytest.fixture(scope="module")
def native() -> Native:
    found = find(prepare())
    assert isinstance(found, Native)
    return found


def weights(rows: int = 40, cols: int = 512, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(scale=0.02, size=(rows, cols)).astype(np.float32)
    values[0, :256], values[1] = 0.0, 1e-12  # blocks without scale
    values[2, 3] = 40.0
    return values


def inputs(cols: int = 512, count: int = 700) -> np.ndarray:
    """Correlated, and of very different sizes."""
    rng = np.random.default_rng(1)
    mixed = rng.normal(size=(count, cols)) @ rng.normal(size=(cols, cols)) / np.sqrt(cols)
    return ((mixed + rng.normal(size=(count, 1))) * np.exp(rng.normal(size=cols))).astype(np.float32)


def share(values: np.ndarray, other: np.ndarray) -> float:
    return float(np.square(values - other).sum() / np.square(values).sum())


@pytest.mark.parametrize("name", TYPES)
def test_blocks_are_read_by_the_gguf_package(native: Native, name: str) -> None:
    values, type = weights()[3:], GGMLType[name]
    blocks = quantize_blocks(native, type, values, None)
    read = gguf.dequantize(blocks, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(read, dequantize_blocks(native, type, blocks, values.shape[1]))
    if name in ERRORS:
        assert share(values, read) < ERRORS[name]
    else:
        simple = gguf.quantize(values, gguf.GGMLQuantizationType[name])
        assert share(values, read) < share(values, gguf.dequantize(simple, gguf.GGMLQuantizationType[name]))


@pytest.mark.parametrize("name", TYPES)
def test_odd_blocks(native: Native, name: str) -> None:
    """Zeros, tiny values, an outlier."""
    values, type = weights()[:3], GGMLType[name]
    read = dequantize_blocks(native, type, quantize_blocks(native, type, values, None), values.shape[1])
    assert not read[0, :256].any()
    assert np.abs(read[1]).max() <= 1e-6
    assert abs(read[2, 3] - 40.0) < 1.0


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_important_columns_are_closer(native: Native, name: str) -> None:
    values, type = weights()[3:], GGMLType[name]
    importance = np.where(np.arange(512) % 8 == 0, 100.0, 0.01).astype(np.float32)
    plain, weighted = (
        dequantize_blocks(native, type, quantize_blocks(native, type, values, each), 512) for each in (None, importance)
    )
    assert share(values[:, ::8], weighted[:, ::8]) < 0.9 * share(values[:, ::8], plain[:, ::8])


@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q3_K", "Q4_K", "Q6_K"])
def test_recoded_blocks_give_outputs_with_less_error(native: Native, name: str) -> None:
    values, type, x = weights()[3:], GGMLType[name], inputs()
    moments = x.T @ x
    blocks = quantize_blocks(native, type, values, np.square(x).mean(0))
    recoded = recode_blocks(native, type, blocks, values, moments)
    before, after = (x @ dequantize_blocks(native, type, each, 512).T for each in (blocks, recoded))
    assert share(x @ values.T, after) < 0.8 * share(x @ values.T, before)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("size", [32, 64, 128])
def test_groups(native: Native, size: int, zeros: bool) -> None:
    values = weights()[3:]
    limits = (0, 15) if zeros else (-8, 7)
    groups = fit_groups(native, values, size, limits, None, zeros=zeros)
    assert groups.scales.shape == (37, 512 // size)
    codes = nearest_codes(values, groups)
    assert codes.min() >= limits[0]
    assert codes.max() <= limits[1]
    assert share(values, on_grid(groups, codes)) < 0.016
    assert (groups.zeros == np.rint(groups.zeros)).all()
    assert groups.zeros.min() >= 0
    assert groups.zeros.max() <= 15


def on_grid(groups: Groups, codes: np.ndarray) -> np.ndarray:
    scales, bases = groups.grid()
    return scales * codes + bases


def test_feedback_is_gptq(native: Native) -> None:
    """Against the plain loop over columns, in float64 and without blocks."""
    values, x = weights(8, 256)[3:], inputs(256)
    moments = x.T @ x
    groups = fit_groups(native, values, 64, (-8, 7), None, zeros=False)
    codes = round_with_feedback(native, values, groups.grid(), (-8, 7), moments)
    expected = plain_gptq(values, np.repeat(groups.scales, 64, axis=1), moments)
    assert (codes != expected).mean() < 0.002  # float32 decides near the middle between two codes
    assert share(x @ values.T, x @ on_grid(groups, codes).T) < 0.7 * share(
        x @ values.T, x @ on_grid(groups, nearest_codes(values, groups)).T
    )


def plain_gptq(values: np.ndarray, scales: np.ndarray, moments: np.ndarray) -> np.ndarray:
    order = np.argsort(-np.diagonal(moments), kind="stable")
    hessian = moments[np.ix_(order, order)].astype(np.float64)
    hessian += 0.01 * np.diagonal(hessian).mean() * np.eye(len(hessian))
    left, codes = values[:, order].astype(np.float64), np.zeros_like(values)
    inverse = np.linalg.inv(hessian)
    for at, column in enumerate(order):
        codes[:, column] = np.clip(np.rint(left[:, at] / scales[:, column]), -8, 7)
        error = (left[:, at] - codes[:, column] * scales[:, column]) / inverse[at, at]
        left -= np.outer(error, inverse[at])
        inverse -= np.outer(inverse[:, at], inverse[at]) / inverse[at, at]
    return codes


def test_dead_and_dependent_inputs_are_no_error(native: Native) -> None:
    values, x = weights(8, 128)[3:], np.zeros((50, 128), np.float32)
    x[:, ::4] = inputs(32, 50)
    groups = fit_groups(native, values, 32, (-8, 7), np.square(x).mean(0), zeros=False)
    codes = round_with_feedback(native, values, groups.grid(), (-8, 7), x.T @ x)
    assert np.isfinite(codes).all()
    assert share((x @ values.T), x @ on_grid(groups, codes).T) < 0.02


def test_float8_is_rounded_as_torch_does() -> None:
    middles = np.linspace(-464, 464, 4001)
    values = np.concatenate([middles, np.exp2(np.linspace(-12, 9, 3000)), [0.0, -0.0, 2**-10, 3 * 2**-10]])
    values = values[np.abs(values) <= 448].astype(np.float32)
    expected = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(to_e4m3(values), expected)


def test_nf4_takes_the_nearest_level() -> None:
    from quire.quant.code_format import NF4

    values = np.random.default_rng(0).normal(size=640).astype(np.float32)
    values[:64] = 0
    codes, largest = to_nf4(values)
    levels = np.array(NF4, np.float32)
    blocks = values.reshape(-1, 64)[1:] / largest[1:, None]
    np.testing.assert_array_equal(codes.reshape(-1, 64)[1:], np.abs(blocks[..., None] - levels).argmin(-1))
    assert (levels[codes[:64]] * largest[0] == 0).all()
