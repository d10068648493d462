"""Linear: a Weight of any storage format, and an optional bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.layers.source import Part, Source

if TYPE_CHECKING:
    from torch import Tensor


class Linear:
    """y = x W^T + b. W and b are the concatenated parts. A part's name is that of a layer, not of a tensor."""

    def __init__(self, source: Source, parts: Sequence[Part], cols: int, *, bias: bool = False) -> None:
        self.weight = source.matrix([part.tensor("weight") for part in parts], cols)
        self.bias = source.vector([part.tensor("bias") for part in parts]) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]"""
        y: Tensor = self.weight.matmul(x)
        return y if self.bias is None else y + self.bias
