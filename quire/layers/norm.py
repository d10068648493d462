"""RMSNorm: scale a vector to unit mean square, then each of its dimensions by a weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.kernels import Kernels
from quire.layers.source import Part, Source

if TYPE_CHECKING:
    from torch import Tensor


class RMSNorm:
    """With `offset` the checkpoint holds weight - 1, as Gemma's do. The weight is multiplied by `factor`."""

    def __init__(
        self,
        source: Source,
        ops: Kernels,
        name: str,
        *,
        size: int,
        eps: float,
        offset: bool = False,
        factor: float = 1.0,
    ) -> None:
        self.weight = source.vector([Part(f"{name}.weight", size)], plus_one=offset)
        if factor != 1.0 and self.weight is not None:  # a Survey has no values
            self.weight = self.weight * ops.arrays.put([factor], "float32")  # in float32, whatever the weights' type
        self.eps = eps
        self.ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] -> [..., size]"""
        normed: Tensor = self.ops.rms_norm(x, self.weight, self.eps)
        return normed

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and the sum. Both arguments may be overwritten. Without residual, x is the sum."""
        if residual is None:
            return self(x), x
        normed, total = self.ops.rms_norm(x, self.weight, self.eps, residual)
        return normed, total
