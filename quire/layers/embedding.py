"""Embedding turns tokens into vectors; Head turns vectors into logits.

In a model with tied embeddings they hold the same Weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.kernels import Kernels
from quire.kernels.shares import Ranks, own_outputs
from quire.layers.source import Part, Source
from quire.quant.weight import Weight

if TYPE_CHECKING:
    from torch import Tensor


class Embedding:
    """A row of the matrix for each token, times `scale` if there is one, or times `multiplier`.

    Each of several ranks has some rows.
    """

    def __init__(
        self,
        source: Source,
        name: str,
        *,
        vocab_size: int,
        hidden_size: int,
        scale: float | None = None,
        multiplier: float = 1.0,
        ranks: Ranks | None = None,
    ) -> None:
        self.own = own_outputs(vocab_size, ranks)
        self.weight = source.matrix([Part(f"{name}.weight", vocab_size).only(self.own)], hidden_size)
        self.ranks = ranks
        # A scale is rounded to the weights' type: models with a scale were trained that way. A multiplier is not.
        self.scale = source.scalar(scale) if scale is not None else multiplier if multiplier != 1.0 else None

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens [n] int64 -> [n, hidden_size]"""
        x: Tensor = self.weight.rows(tokens)
        x = x if self.scale is None else x * self.scale
        return x if self.ranks is None else self.ranks.gather_rows(x, self.own.start)


class Head:
    """The output projection (lm_head): logits in float32."""

    def __init__(self, weight: Weight, ops: Kernels, *, softcap: float | None = None) -> None:
        self.weight = weight
        self.softcap = softcap
        self.ops = ops

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden_size] -> [n, vocab_size] float32"""
        return self.cap(self.weight.matmul(hidden))

    def cap(self, products: Tensor) -> Tensor:
        """Products of the matrix, which may be overwritten -> logits: float32, with the soft cap applied."""
        logits: Tensor = self.ops.logits(products, self.softcap)
        return logits
