"""Weight: the matrix of a `Linear` or an `Embedding`, in any storage format.

A quantization scheme is a class with these methods. Layers use only the protocol. `Dense` is an unquantized matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class Weight(Protocol):
    """A matrix of `shape` (out, in) that multiplies from the right: y = x W^T."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        ...

    def matmul(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], in x's dtype."""
        ...

    def argmax(self, x: Tensor, rows: Sequence[int]) -> tuple[list[int], list[float]]:
        """For the given rows of x [m, in]: index and value of the largest product, first of equals; NaN is largest."""
        ...

    def rows(self, index: Tensor) -> Tensor:
        """The given rows, dense: [n] -> [n, in]. This is an embedding look-up."""
        ...

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The whole matrix, dense: [out, in]."""
        ...


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

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.data.to(dtype)


class Stacked:
    """Parts of different storage formats, with their rows concatenated: q, k and v of mixed types."""

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

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.cat([part.dense(dtype) for part in self.parts])
