"""AffineWeight: a scaled output matrix, and one with a bias, on torch and on the C++ kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.errors import UnsupportedModel
from quire.quant.affine import AffineWeight
from quire.quant.dense import Dense
from quire.quant.panels import PanelWeight
from tests.tools.native import native_of, random_panels

pytestmark = pytest.mark.cpu

X = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
BIAS = torch.randn(97, generator=torch.Generator().manual_seed(1))
PANELS = PanelWeight([random_panels("f32", 97, 64)], native_of())
MATRIX = torch.from_numpy(PANELS.dense())
INNER = {"torch": (Dense(MATRIX), X, BIAS), "native": (PANELS, X.numpy(), BIAS.numpy())}


@pytest.mark.parametrize("backend", INNER)
@pytest.mark.parametrize(("scale", "has_bias"), [(0.25, False), (None, True), (3.0, True)])
def test_products_and_their_argmax(backend: str, scale: float | None, has_bias: bool) -> None:
    inner, x, bias = INNER[backend]
    weight = AffineWeight(inner, scale=scale, bias=bias if has_bias else None)
    expected = X @ MATRIX.T * (scale or 1.0) + (BIAS if has_bias else 0.0)
    torch.testing.assert_close(torch.as_tensor(weight.matmul(x)), expected)
    index, values = weight.argmax(x, [0, 3])
    assert index == expected[[0, 3]].argmax(-1).tolist()
    torch.testing.assert_close(torch.tensor(values), expected[[0, 3]].amax(-1))


@pytest.mark.parametrize("backend", INNER)
def test_rows(backend: str) -> None:
    inner, _, bias = INNER[backend]
    index = np.array([3, 96]) if backend == "native" else torch.tensor([3, 96])
    rows = AffineWeight(inner, scale=0.5).rows(index)
    torch.testing.assert_close(torch.as_tensor(rows), MATRIX[[3, 96]] * 0.5)
    with pytest.raises(UnsupportedModel, match="output matrix has a bias"):
        AffineWeight(inner, bias=bias).rows(index)
