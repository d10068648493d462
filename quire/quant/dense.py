"""Dense: an unquantized matrix in torch. Stacked: several weights as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from quire.quant.weight import Weight


def argmax_of_products(weight: Weight, x: Tensor, rows: Sequence[int]) -> tuple[list[int], list[float]]:
    """`Weight.argmax` from all products."""
    value, index = weight.matmul(x[torch.tensor(rows, device=x.device)]).float().max(dim=-1)
    return index.tolist(), value.tolist()


class Dense:
    """A plain matrix in the dtype it computes in."""

    def __init__(self, data: Tensor, linear: Callable[[Tensor, Tensor], Tensor] = functional.linear) -> None:
        assert data.dim() == 2, data.shape
        self.data = data
        self._linear = linear

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def matmul(self, x: Tensor) -> Tensor:
        return self._linear(x, self.data)

    def argmax(self, x: Tensor, rows: Sequence[int]) -> tuple[list[int], list[float]]:
        return argmax_of_products(self, x, rows)

    def rows(self, index: Tensor) -> Tensor:
        return functional.embedding(index, self.data)

    def dense(self) -> Tensor:
        return self.data.float()


class Stacked:
    """Parts of different storage formats, with their rows concatenated: q, k and v of mixed types."""

    data = None

    def __init__(self, parts: Sequence[Weight]) -> None:
        assert len({part.shape[1] for part in parts}) == 1
        self.parts = list(parts)

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def matmul(self, x: Tensor) -> Tensor:
        return torch.cat([part.matmul(x) for part in self.parts], dim=-1)

    def argmax(self, x: Tensor, rows: Sequence[int]) -> tuple[list[int], list[float]]:
        return argmax_of_products(self, x, rows)

    def rows(self, index: Tensor) -> Tensor:
        return self.dense()[index]

    def dense(self) -> Tensor:
        return torch.cat([part.dense() for part in self.parts])
