"""Weight: the matrix of a `Linear` or an `Embedding`, in any storage format.

A quantization scheme is a class with these methods. Layers use only the protocol. `panels.py` has the weights of
quire's CPU kernels, on numpy arrays. `dense.py` has unquantized matrices in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.kernels.arrays import Array


class Weight(Protocol):
    """A matrix of `shape` (out, in) that multiplies from the right: y = x W^T."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        ...

    @property
    def data(self) -> Array | None:
        """The matrix itself if it is a plain tensor, for kernels that fuse the product with other ops."""
        ...

    def matmul(self, x: Array) -> Array:
        """x [..., in] -> [..., out], in x's dtype."""
        ...

    def argmax(self, x: Array, rows: Sequence[int]) -> tuple[list[int], list[float]]:
        """For the given rows of x [m, in]: index and value of the largest product, first of equals; NaN is largest."""
        ...

    def rows(self, index: Array) -> Array:
        """The given rows, dense: [n] -> [n, in]. This is an embedding look-up."""
        ...

    def dense(self) -> Array:
        """The whole matrix in float32: [out, in]."""
        ...
