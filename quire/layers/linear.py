"""Linear: a matrix, however it is stored, and perhaps a bias. It does not know how its matrix is quantized."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from quire.layers.source import Part, Source


class Linear:
    """y = x W^T + b, where W and b are those of the parts, one below the other; a part has the name of its layer."""

    def __init__(self, source: Source, parts: Sequence[Part], cols: int, *, bias: bool = False) -> None:
        self.weight = source.matrix([part.tensor("weight") for part in parts], cols)
        self.bias = source.vector([part.tensor("bias") for part in parts]) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]"""
        y = self.weight.matmul(x)
        return y if self.bias is None else y + self.bias
