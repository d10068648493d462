"""Medusa: a few small heads on the target's final hidden state. Head i predicts the token i + 2 places later.

`engine/medusa.py` runs them, `weights/heads.py` loads them. Tensor names are those of published Medusa heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.kernels import Kernels
from quire.layers.linear import Linear
from quire.layers.source import Part, Source
from quire.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """`has_own_outputs`: each head has an output matrix of its own. Else they use rows of the target's."""

    num_heads: int
    num_layers: int
    has_own_outputs: bool


class Medusa:
    """Each layer of a head is x + silu(linear(x))."""

    def __init__(self, config: MedusaConfig, source: Source, ops: Kernels, target: Decoder) -> None:
        vocab_size, size = target.head.weight.shape
        self.config = config
        self.ops = ops
        layers = range(config.num_layers)
        self.heads = [
            [Linear(source, [Part(f"{head}.{layer}.linear", size)], size, bias=True) for layer in layers]
            for head in range(config.num_heads)
        ]
        self.outputs = [
            source.matrix([Part(f"{head}.{config.num_layers}.weight", vocab_size)], size)
            for head in range(config.num_heads if config.has_own_outputs else 0)
        ]

    def __call__(self, hidden: Any) -> list[Any]:
        """hidden [n, hidden_size] -> for each head [n, hidden_size]"""
        states = []
        for layers in self.heads:
            x = hidden
            for linear in layers:
                x = self.ops.add(x, self.ops.activate(linear(x), "silu"))
            states.append(x)
        return states
