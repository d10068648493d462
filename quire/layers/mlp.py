"""GatedMLP: down(activation(gate(x)) * up(x)), with gate and up in one matrix."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from quire.kernels import Kernels
from quire.layers.linear import Linear
from quire.layers.source import Source


class GatedMLP:
    """The feed-forward half of a layer, under `name` in the checkpoint."""

    def __init__(
        self,
        source: Source,
        ops: Kernels,
        name: str,
        *,
        hidden_size: int,
        intermediate_size: int,
        activation: Literal["silu", "gelu_tanh"] = "silu",
        bias: bool = False,
    ) -> None:
        gate_up = [(f"{name}.{part}_proj", intermediate_size) for part in ("gate", "up")]
        self.gate_up = Linear(source, gate_up, hidden_size, bias=bias)
        self.down = Linear(source, [(f"{name}.down_proj", hidden_size)], intermediate_size, bias=bias)
        self.activate = {"silu": ops.silu_mul, "gelu_tanh": ops.gelu_mul}[activation]

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden_size] -> [tokens, hidden_size]"""
        return self.down(self.activate(self.gate_up(x)))
