"""MedusaModule: Medusa heads in torch. `models/medusa.py` is what the engine runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.train.features import Batch, Inputs
from quire.train.target import Target


class Residual(nn.Module):
    """x + silu(linear(x)). It starts as the identity."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.silu(self.linear(x))


class MedusaModule(nn.Module):
    """Head i predicts the draft i of an anchor from the final state of the token before the anchor."""

    bigrams = None
    rates: ClassVar[Mapping[str, float]] = {}

    def __init__(self, target: Target, depth: int) -> None:
        super().__init__()
        self.heads = [Residual(target.hidden_size) for _ in range(depth)]
        for index, head in enumerate(self.heads):
            self.add_module(f"{index}", nn.ModuleDict({"0": head}))
        self.depth = depth
        self.inputs = Inputs()

    def forward(self, batch: Batch) -> Tensor:
        hidden = batch.at_anchors(batch.hidden, -1)
        return torch.stack([head(hidden) for head in self.heads], dim=2)

    def describe(self) -> dict[str, Any]:
        return {"depth": self.depth, "medusa_num_heads": self.depth, "medusa_num_layers": 1}
