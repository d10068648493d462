"""Parts of matrices that are stored as codes: dense values and panels, for columns in order and for sorted ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.errors import BadModelFile, UnsupportedModel
from quire.kernels.cpu.native import Missing, load
from quire.kernels.cpu.tape import address
from quire.layers.source import Part
from quire.quant.code_format import CodeFormat, CodeRows, dequantize
from quire.weights import code_part
from quire.weights.code_part import CodePart
from quire.weights.schemes.scheme import CodeMatrix, Module

pytestmark = pytest.mark.cpu

MODULE: Any = load()
FORMAT = CodeFormat("uint", 4, 32, "f16", zero=8)
ROWS, COLS = 40, 64


class Files:
    """Stands in for the files, which only errors name here."""

    directory = Path("model")


def make_rows() -> CodeRows:
    rng = np.random.default_rng(0)
    scales = rng.uniform(0.01, 0.02, (ROWS, 2)).astype(np.float16).astype(np.float32)
    return CodeRows(rng.integers(0, 16, (ROWS, COLS), dtype=np.uint8), scales)


def make_part(order: Any = None, part: Part | None = None, rows: CodeRows | None = None) -> tuple[CodePart, CodeRows]:
    rows = rows or make_rows()
    files: Any = Files()
    module = Module(files, str, "model.layers.0.mlp.up_proj", ROWS, COLS)
    matrix = CodeMatrix({}, FORMAT, lambda chosen: CodeRows(rows.codes[chosen], rows.scales[chosen]), order)
    return CodePart.of(module, matrix, part or Part("model.layers.0.mlp.up_proj.weight", ROWS)), rows


def sorted_columns(is_sorted: bool) -> Any:
    return np.random.default_rng(1).permutation(COLS) if is_sorted else None


def test_values_are_in_the_order_of_the_inputs() -> None:
    order = sorted_columns(True)
    part, rows = make_part(order)
    values = part.values(3, 7)
    assert np.array_equal(values[:, order], dequantize(FORMAT, rows)[3:7])


def test_parts_of_a_fused_tensor_have_their_rows_and_columns() -> None:
    runs = (range(2, 6), range(20, 30))
    part, rows = make_part(part=Part("a.weight", 14, fused_rows=ROWS, order=runs, columns=range(32, 64)))
    expected = dequantize(FORMAT, rows)[np.r_[2:6, 20:30], 32:64]
    assert np.array_equal(part.values(0, 14), expected)


@pytest.mark.parametrize("order", [None, np.arange(COLS)[::-1].copy()])
def test_columns_that_split_groups_are_refused(order: Any) -> None:
    columns = range(16, 48) if order is None else range(32, 64)
    with pytest.raises(UnsupportedModel, match="cannot be split"):
        make_part(order, Part("a.weight", ROWS, columns=columns))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scales_that_are_not_numbers_are_refused_by_name(bad: float) -> None:
    rows = make_rows()
    rows.scales[17, 1] = bad
    part, _ = make_part(rows=rows)
    with pytest.raises(BadModelFile, match=r"model.layers.0.mlp.up_proj: a scale is not a finite number"):
        part.values(0, ROWS)


@pytest.mark.parametrize("is_sorted", [False, True])
def test_dense_rows_are_filled_in_slices(is_sorted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(code_part, "SLICE_VALUES", 16 * COLS)
    part, _ = make_part(sorted_columns(is_sorted))
    out = torch.full((ROWS, COLS), float("nan"))
    tasks = part.fill(out)
    for task in reversed(tasks):
        task()
    assert len(tasks) == 3
    assert np.array_equal(out.numpy(), part.values(0, ROWS))


@pytest.mark.skipif(isinstance(MODULE, Missing), reason="the C++ kernels are not built")
@pytest.mark.parametrize("is_sorted", [False, True])
def test_panels_have_the_codes_in_their_own_order(is_sorted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_part, "SLICE_VALUES", 16 * COLS)
    part, rows = make_part(sorted_columns(is_sorted))
    panels = MODULE.Panels(part.panel_format, ROWS + 16, COLS)
    for task in part.pack(panels, 16, None):  # type: ignore[arg-type]
        task()
    index, out = np.arange(16, 16 + ROWS), np.empty((ROWS, COLS), np.float32)
    panels.unpack_rows(address(index), ROWS, address(out))
    assert panels.format == "int4-g32"
    assert np.array_equal(out, dequantize(FORMAT, rows))
