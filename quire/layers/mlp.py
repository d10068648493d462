"""GatedMLP: down(activation(gate(x)) * up(x)), with gate and up in one matrix. MLP: down(activation(up(x)))."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.kernels import Kernels
from quire.kernels.shares import own_outputs, own_unit
from quire.layers.linear import Linear, output_linear
from quire.layers.source import Part, Source, fused_parts

if TYPE_CHECKING:
    from torch import Tensor


class GatedMLP:
    """The feed-forward half of a layer, under `name` in the checkpoint. With `fused`, gate and up are stored as one."""

    def __init__(
        self,
        source: Source,
        ops: Kernels,
        name: str,
        *,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "silu",
        bias: bool = False,
        fused: bool = False,
    ) -> None:
        gate_up = [Part(f"{name}.{layer}_proj", intermediate_size, split="rows") for layer in ("gate", "up")]
        if fused:
            gate_up = fused_parts(Part(f"{name}.gate_up_proj", 0, split="rows"), [intermediate_size] * 2)
        inner, unit = own_outputs(intermediate_size, ops.ranks), own_unit(intermediate_size, ops.ranks)
        self.gate_up = Linear(source, [part.only(inner) for part in gate_up], hidden_size, bias=bias)
        down = Part(f"{name}.down_proj", hidden_size, split="columns")
        self.down = output_linear(source, ops, down, intermediate_size, inputs=inner, unit=unit, bias=bias)
        self.activate = {"silu": ops.silu_mul, "gelu_tanh": ops.gelu_mul}[activation]
        self.activation = activation
        self.fused = None if bias else ops.fused
        # Weights of codes have a kernel of their own for this, for some numbers of rows.
        self.gated = None if bias else getattr(self.gate_up.weight, "gated", None)

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden_size] -> [tokens, hidden_size]"""
        return self.down(self._gate(x))

    def _gate(self, x: Tensor) -> Tensor:
        weight = self.gate_up.weight
        if self.fused is not None and weight.data is not None:
            return self.fused.gated_linear(x, weight.data, self.activation)
        gated: Tensor | None = None if self.gated is None else self.gated(x, self.activation.partition("_")[0])
        return self.activate(self.gate_up(x)) if gated is None else gated


class MLP:
    """The same without a gate. `transposed` matrices are stored as (in, out)."""

    def __init__(
        self,
        source: Source,
        ops: Kernels,
        name: str,
        *,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        bias: bool = False,
        transposed: bool = False,
    ) -> None:
        up = Part(f"{name}.up_proj", intermediate_size, split="rows", transposed=transposed)
        down = Part(f"{name}.down_proj", hidden_size, split="columns", transposed=transposed)
        inner, unit = own_outputs(intermediate_size, ops.ranks), own_unit(intermediate_size, ops.ranks)
        self.up = Linear(source, [up.only(inner)], hidden_size, bias=bias)
        self.down = output_linear(source, ops, down, intermediate_size, inputs=inner, unit=unit, bias=bias)
        self.activation = activation
        self.ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden_size] -> [tokens, hidden_size]"""
        return self.down(self.ops.activate(self.up(x), self.activation))
