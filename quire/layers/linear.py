"""Linear: a Weight of any storage format, and an optional bias. JoinedLinear: the same for two inputs side by side.
GatheredLinear: the outputs of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.kernels import Kernels
from quire.kernels.shares import BLOCK, Ranks, share_outputs
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


class JoinedLinear:
    """y = [a, b] W^T + bias, for two inputs of one size. Each is multiplied with its own columns of W."""

    def __init__(self, source: Source, ops: Kernels, parts: Sequence[Part], size: int, *, bias: bool = False) -> None:
        first, second = ([replace(part, columns=range(start, start + size)) for part in parts] for start in (0, size))
        self.first = source.matrix([part.tensor("weight") for part in first], 2 * size)
        self.second = source.matrix([part.tensor("weight") for part in second], 2 * size)
        self.bias = source.vector([part.tensor("bias") for part in parts]) if bias else None
        self.ops = ops

    def __call__(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        """Two tensors [n, size] -> [n, out]"""
        a, b = inputs
        y: Tensor = self.second.matmul(b)
        return self.ops.add(self.first.matmul(a), y if self.bias is None else y + self.bias)


class GatheredLinear:
    """A Linear of which each rank computes some outputs. The result has the outputs of all ranks.

    `inputs` are the columns of x that this rank has, all ranks in multiples of `unit`.
    """

    def __init__(
        self, source: Source, ranks: Ranks, part: Part, cols: int, *, inputs: range, unit: int, bias: bool = False
    ) -> None:
        self.outputs, self.num_outputs = share_outputs(part.rows, ranks.rank, ranks.size), part.rows
        self.inputs, self.num_inputs = inputs, cols
        self.linear = Linear(source, [part.only(self.outputs)], cols, bias=bias)
        self.weight = self.linear.weight
        # The same for all ranks: whether they share what the product reads in whole blocks.
        self.reader = self.weight if unit % BLOCK == 0 and cols % BLOCK == 0 else None
        self.ranks = ranks

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, inputs] -> [tokens, out]"""
        if len(self.inputs) < self.num_inputs:
            x = self.ranks.all_gather(x, self.inputs.start, self.num_inputs, reader=self.reader)
        y: Tensor = self.ranks.all_gather(self.linear(x), self.outputs.start, self.num_outputs)
        return y


def output_linear(
    source: Source, ops: Kernels, part: Part, cols: int, *, inputs: range, unit: int, bias: bool = False
) -> Linear | GatheredLinear:
    """The Linear behind attention or an MLP. `inputs` are the columns that the rank computes of its input, in multiples
    of `unit`."""
    if ops.ranks is None:
        return Linear(source, [part], cols, bias=bias)
    return GatheredLinear(source, ops.ranks, part, cols, inputs=inputs, unit=unit, bias=bias)
