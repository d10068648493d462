"""ExitModule: a norm and a low-rank adapter behind the first layers of the target, before its output matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.train.features import Batch, Inputs
from quire.train.heads.head import Norm, linear, state_scale
from quire.train.settings import RANK
from quire.train.target import Target

FLATTEN = 0.3  # of the first logits: at first they are those of no layer that the target's output was made for
UP_RATE = 5.0  # for states of size 1


class ExitModule(nn.Module):
    """x = state after the first `layer` layers; y = x + up(silu(down(norm(x)))); out_norm(y). An anchor has one place:
    what the whole target predicts after it."""

    bigrams = None
    depth = 1

    def __init__(self, target: Target, layer: int, generator: torch.Generator, text: Sequence[int]) -> None:
        """`text` is any text of the target's, to see how large its states are: the adapter adds to them."""
        super().__init__()
        size, rank, eps = target.hidden_size, min(RANK, target.hidden_size), target.config.norm_eps
        self.layer = layer
        self.eps = eps
        self.inputs = Inputs((layer - 1,))
        self.norm = Norm(torch.ones(size), eps)
        self.out_norm = Norm(FLATTEN * target.as_tensor(target.model.norm.weight).float().cpu(), eps)
        scale = state_scale(target, layer - 1, text)
        self.adapter_down = linear(rank, size, generator)
        self.adapter_up = linear(size, rank, generator, gain=0.1 * scale)
        self.rates = {"adapter_up.weight": UP_RATE * scale}

    def forward(self, batch: Batch) -> Tensor:
        x = batch.at_anchors(batch.taps)[:, :, 0]
        y = x + self.adapter_up(functional.silu(self.adapter_down(self.norm(x))))
        out: Tensor = self.out_norm(y)
        return out[:, :, None]

    def describe(self) -> dict[str, Any]:
        return {"layer": self.layer, "rank": self.adapter_down.weight.shape[0], "rms_norm_eps": self.eps}
