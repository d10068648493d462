"""A `Source` over tensors by name, such as a transformers model's state dict; it knows what was not asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quire.layers.source import Part
from quire.quant.dense import Dense
from quire.quant.weight import Weight


class StateDictSource:
    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
        self.tensors = tensors
        self.dtype = dtype
        self.asked: set[str] = set()

    @property
    def left_over(self) -> set[str]:
        return set(self.tensors) - self.asked

    def matrix(self, parts: Sequence[Part], cols: int) -> Weight:
        return Dense(torch.cat([self._take(part, cols) for part in parts]))

    def vector(self, parts: Sequence[Part], *, plus_one: bool = False) -> Tensor:
        values = torch.cat([self._take(part, None) for part in parts])
        return 1.0 + values.float() if plus_one else values

    def scalar(self, value: float) -> Tensor:
        return torch.tensor(value, dtype=self.dtype)

    def _take(self, part: Part, cols: int | None) -> Tensor:
        tensor, shape = self.tensors[part.name], part.stored_shape(cols)
        assert tuple(tensor.shape) == shape, f"{part.name} is {tuple(tensor.shape)}, asked for as {shape}"
        self.asked.add(part.name)
        rows = tensor.detach().T if part.transposed and cols is not None else tensor.detach()
        index = [row for run in part.stored_runs(0, part.rows) for row in run]
        return rows[index].to(self.dtype)
