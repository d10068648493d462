"""A `Source` over tensors by name, such as a transformers model's state dict; it knows what was not asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quire.quant.weight import Dense, Weight


class StateDictSource:
    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
        self.tensors = tensors
        self.dtype = dtype
        self.asked: set[str] = set()

    @property
    def left_over(self) -> set[str]:
        return set(self.tensors) - self.asked

    def matrix(self, parts: Sequence[tuple[str, int]], cols: int) -> Weight:
        return Dense(torch.cat([self._take(name, (rows, cols)) for name, rows in parts]))

    def vector(self, parts: Sequence[tuple[str, int]]) -> Tensor:
        return torch.cat([self._take(name, (length,)) for name, length in parts])

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self.tensors[name]
        assert tuple(tensor.shape) == shape, f"{name} is {tuple(tensor.shape)}, asked for as {shape}"
        self.asked.add(name)
        return tensor.detach().to(self.dtype)
