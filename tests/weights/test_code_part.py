"""Parts of matrices that are stored as codes: dense values and panels, for columns in order and for sorted ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.kernels.cpu.native import Missing, load
from quire.kernels.cpu.tape import address
from quire.layers.source import Part
from quire.quant.code_format import CodeFormat, CodeRows, dequantize
from quire.weights import code_part
from quire.weights.code_part import CodePart

pytestmark = pytest.mark.cpu

MODULE: Any = load()
FORMAT = CodeFormat("uint", 4, 32, "f16", zero=8)
ROWS, COLS = 40, 64


def make_part(order: Any = None) -> tuple[CodePart, CodeRows]:
    rng = np.random.default_rng(0)
    scales = rng.uniform(0.01, 0.02, (ROWS, 2)).astype(np.float16).astype(np.float32)
    rows = CodeRows(rng.integers(0, 16, (ROWS, COLS), dtype=np.uint8), scales)
    part = CodePart(
        Part("model.layers.0.mlp.up_proj.weight", ROWS),
        COLS,
        {"a.qweight": (8, ROWS)},
        ROWS * COLS // 2,
        FORMAT,
        lambda start, stop: CodeRows(rows.codes[start:stop], rows.scales[start:stop]),
        order,
    )
    return part, rows


def test_values_are_in_the_order_of_the_inputs() -> None:
    order = np.random.default_rng(1).permutation(COLS)
    part, rows = make_part(order)
    values = part.values(3, 7)
    assert np.array_equal(values[:, order], dequantize(FORMAT, rows)[3:7])


@pytest.mark.parametrize("is_sorted", [False, True])
def test_dense_rows_are_filled_in_slices(is_sorted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(code_part, "SLICE_VALUES", 16 * COLS)
    part, _ = make_part(np.random.default_rng(1).permutation(COLS) if is_sorted else None)
    out = torch.full((ROWS, COLS), float("nan"))
    tasks = part.fill(out)
    for task in reversed(tasks):
        task()
    assert len(tasks) == 3
    assert np.array_equal(out.numpy(), part.values(0, ROWS))


@pytest.mark.skipif(isinstance(MODULE, Missing), reason="the C++ kernels are not built")
@pytest.mark.parametrize("is_sorted", [False, True])
def test_panels_have_the_values(is_sorted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_part, "SLICE_VALUES", 16 * COLS)
    part, _ = make_part(np.random.default_rng(1).permutation(COLS) if is_sorted else None)
    panels = MODULE.Panels(part.panel_format, ROWS + 16, COLS)
    for task in part.pack(panels, 16, None):  # type: ignore[arg-type]
        task()
    index, out = np.arange(16, 16 + ROWS), np.empty((ROWS, COLS), np.float32)
    panels.unpack_rows(address(index), ROWS, address(out))
    assert np.array_equal(out, part.values(0, ROWS))
