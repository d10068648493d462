"""AffineWeight: an output matrix whose products are scaled, or get a bias. The `Weight` inside is of any format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.errors import UnsupportedModel
from quire.quant.weight import Weight


class AffineWeight:
    """y = scale * (x W^T) + bias."""

    data = None

    def __init__(self, inner: Weight, *, scale: float | None = None, bias: Any = None) -> None:
        self.inner = inner
        self.scale = scale
        self.bias = bias

    @property
    def shape(self) -> tuple[int, int]:
        return self.inner.shape

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    def matmul(self, x: Any) -> Any:
        y = self.inner.matmul(x)
        if self.scale is not None:
            y = y * self.scale
        return y if self.bias is None else y + self.bias

    def argmax(self, x: Any, rows: Sequence[int]) -> tuple[list[int], list[float]]:
        if self.bias is None:  # the scale is positive
            index, values = self.inner.argmax(x, rows)
            return index, [value * (1.0 if self.scale is None else self.scale) for value in values]
        products = self.matmul(x[list(rows)])
        if isinstance(products, np.ndarray):
            index_of = np.where(np.isnan(products), np.inf, products).argmax(-1)
            return index_of.tolist(), products[np.arange(len(products)), index_of].tolist()
        value, indices = products.float().max(dim=-1)
        return indices.tolist(), value.tolist()

    def rows(self, index: Any) -> Any:
        return self._scaled(self.inner.rows(index))

    def dense(self) -> Any:
        return self._scaled(self.inner.dense())

    def _scaled(self, rows: Any) -> Any:
        if self.bias is not None:
            raise UnsupportedModel(
                "this model's output matrix has a bias, so draft heads and vocabularies that copy its rows cannot be "
                "used. Leave out the draft head, or use 'ngram' or a draft model."
            )
        return rows if self.scale is None else rows * self.scale
