"""RMSNorm scales a vector to unit mean square, LayerNorm to mean 0 and variance 1. A weight scales each dimension."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.kernels import Kernels
from quire.layers.source import Part, Source

if TYPE_CHECKING:
    from torch import Tensor


class RMSNorm:
    """With `offset` the checkpoint holds weight - 1, as Gemma's do."""

    def __init__(self, source: Source, ops: Kernels, name: str, *, size: int, eps: float, offset: bool = False) -> None:
        self.weight = source.vector([Part(f"{name}.weight", size)], plus_one=offset)
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


class LayerNorm:
    """With `has_bias` the norm adds a bias to each dimension."""

    def __init__(
        self, source: Source, ops: Kernels, name: str, *, size: int, eps: float, has_bias: bool = True
    ) -> None:
        self.weight = source.vector([Part(f"{name}.weight", size)])
        self.bias = source.vector([Part(f"{name}.bias", size)]) if has_bias else None
        self.eps = eps
        self.ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] -> [..., size]"""
        normed: Tensor = self.ops.layer_norm(x, self.weight, self.bias, self.eps)
        return normed

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """As `RMSNorm.add`."""
        if residual is None:
            return self(x), x
        normed, total = self.ops.layer_norm(x, self.weight, self.bias, self.eps, residual)
        return normed, total


class UnitNorm:
    """An RMSNorm without weights."""

    def __init__(self, ops: Kernels, *, size: int, eps: float) -> None:
        self.weight = ops.arrays.put([1.0] * size, "float32")
        self.eps = eps
        self.ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] -> [..., size]"""
        normed: Tensor = self.ops.rms_norm(x, self.weight, self.eps)
        return normed


Norm = RMSNorm | LayerNorm
