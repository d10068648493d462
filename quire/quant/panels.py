"""PanelWeight: a matrix packed for the C++ kernels. `csrc/panels.h` describes the layout.

Matrices of different storage that are used together (q, k and v of mixed types) are several panels, side by side in the
output. Who fills them is `weights/checkpoint.py`, or `weights/random_weights.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.kernels.cpu.native import Native
from quire.kernels.cpu.recorded import StepTokens
from quire.kernels.cpu.tape import DENSE_FORMATS, Value
from quire.kernels.cpu.tape_memory import SPARE_ROWS, padded
from quire.quant.weight import argmax_of_products

ROWS_IN_PANEL = 16
PANEL_BLOCK = 32  # values that share a scale: columns of quantized panels are a multiple of it


def rounded_format(stored: str, name: str, cols: int, quantize: str | None) -> str:
    """As it is stored, or rounded to our own int8 or int4; the two ends of a model keep 8 bits."""
    if quantize is None or stored not in DENSE_FORMATS or cols % PANEL_BLOCK:
        return stored
    return "q4_1" if quantize == "int4" and ".layers." in name else "q8_0"


@dataclass(frozen=True, slots=True)
class Spare:
    """Room for the rows of one product, as they are and in int8."""

    num_rows: int
    values: Tensor
    rounded: Tensor

    @classmethod
    def make(cls, module: Any, num_rows: int, cols: int) -> Spare:
        size = num_rows + SPARE_ROWS
        rounded = torch.empty(size * module.quantized_row_bytes(cols), dtype=torch.uint8)
        return cls(num_rows, torch.zeros(size, cols), rounded)


class PanelWeight:
    """One matrix of `parts`, which are the extension's `Panels`, one below the other."""

    def __init__(self, parts: Sequence[Any], native: Native) -> None:
        self.parts = list(parts)
        self.native = native
        self._spare: Spare | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.rows for part in self.parts), self.parts[0].cols

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def matmul(self, x: Any) -> Any:
        if isinstance(x, Value):
            return x.tape.matmul(x, self.parts)
        flat = x.reshape(-1, x.shape[-1]).float()
        out = torch.empty(len(flat), padded(self.shape[0]))[:, : self.shape[0]]
        first = 0
        for part in self.parts:
            self._multiply(part, flat, range(len(flat)), out[:, first:])
            first += part.rows
        return out.reshape(*x.shape[:-1], -1).to(x.dtype) if x.dim() != 2 else out.to(x.dtype)

    def argmax(self, x: Tensor, rows: Sequence[int]) -> tuple[list[int], list[float]]:
        if len(self.parts) > 1:
            return argmax_of_products(self, x, rows)
        return self._multiply(self.parts[0], x, rows, None)

    def _multiply(self, part: Any, x: Tensor, rows: Sequence[int], out: Tensor | None) -> tuple[list[int], list[float]]:
        """Products of some rows of x into `out`, or else the largest of each."""
        if not rows:
            return [], []
        x = x if x.stride(1) == 1 else x.contiguous()
        module = self.native.module
        if self._spare is None or self._spare.num_rows < len(rows):
            self._spare = Spare.make(module, len(rows), part.cols)
        found: tuple[list[int], list[float]] = module.multiply(
            self.native.isa,
            self.native.threads,
            part,
            rows,
            (x.data_ptr(), x.stride(0)),
            (self._spare.values.data_ptr(), part.cols),
            (self._spare.rounded.data_ptr(), part.cols),
            (out.data_ptr(), out.stride(0)) if out is not None else (0, 0),
        )
        return found

    def rows(self, index: Any) -> Any:
        if isinstance(index, StepTokens):
            (part,) = self.parts
            return index.tape.embed(part, by_position=index.are_positions)
        out = torch.empty(len(index), self.shape[1])
        for part, own, at in self._split(index):
            found = torch.empty(len(own), self.shape[1])
            part.unpack_rows(own.data_ptr(), len(own), found.data_ptr())
            out[at] = found
        return out

    def _split(self, index: Tensor) -> list[tuple[Any, Tensor, Tensor]]:
        """Each part with the rows of it that are asked for, and where they stand in the answer."""
        found, first = [], 0
        for part in self.parts:
            at = ((index >= first) & (index < first + part.rows)).nonzero().flatten()
            found.append((part, (index[at] - first).contiguous(), at))
            first += part.rows
        return found

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        dense: Tensor = self.rows(torch.arange(self.shape[0])).to(dtype)
        return dense


def join(rows: Sequence[int], formats: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Which parts of so many rows may share panels: neighbours of one format, each but the last whole panels."""
    groups: list[tuple[str, list[int]]] = []
    for index, kind in enumerate(formats):
        if groups and groups[-1][0] == kind and rows[index - 1] % ROWS_IN_PANEL == 0:
            groups[-1][1].append(index)
        else:
            groups.append((kind, [index]))
    return groups
