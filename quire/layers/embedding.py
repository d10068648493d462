"""Embedding turns tokens into vectors; Head turns vectors into logits.

In a model with tied embeddings they hold the same Weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.source import Part, Source
from quire.quant.weight import Weight


class Embedding:
    """A row of the matrix for each token, times `scale` if there is one."""

    def __init__(
        self, source: Source, name: str, *, vocab_size: int, hidden_size: int, scale: float | None = None
    ) -> None:
        self.weight = source.matrix([Part(f"{name}.weight", vocab_size)], hidden_size)
        self.scale = scale

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens [n] int64 -> [n, hidden_size]"""
        x = self.weight.rows(tokens)
        # The factor is rounded to x's dtype: models with a scale were trained that way.
        return x if self.scale is None else x * torch.tensor(self.scale, dtype=x.dtype, device=x.device)


class Head:
    """The output projection (lm_head): logits in float32."""

    def __init__(self, weight: Weight, *, softcap: float | None = None) -> None:
        self.weight = weight
        self.softcap = softcap

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden_size] -> [n, vocab_size] float32"""
        return self.cap(self.weight.matmul(hidden))

    def cap(self, products: Tensor) -> Tensor:
        """Products of the matrix -> logits: float32, with the soft cap applied."""
        logits = products.float()
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
