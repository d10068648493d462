"""PanelWeight: a matrix packed for the C++ kernels. `csrc/panels.h` describes the layout.

A fused matrix of several formats (q, k and v of mixed types) is several `Panels`, whose outputs are concatenated.
`weights/checkpoint.py` and `weights/random_weights.py` fill them.
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
from quire.kernels.cpu.tape_memory import PADDING_ROWS, padded
from quire.quant.weight import argmax_of_products

ROWS_IN_PANEL = 16
PANEL_BLOCK = 32  # values that share a scale: columns of quantized panels are a multiple of it


def rounded_format(stored: str, name: str, cols: int, quantize: str | None) -> str:
    """The format as stored, or our int8 or int4 format. Embedding and head are never rounded to less than 8 bits."""
    if quantize is None or stored not in DENSE_FORMATS or cols % PANEL_BLOCK:
        return stored
    return "q4_1" if quantize == "int4" and ".layers." in name else "q8_0"


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory for the input rows of one product, in float32 and in int8."""

    num_rows: int
    values: Tensor
    rounded: Tensor

    @classmethod
    def make(cls, module: Any, num_rows: int, cols: int) -> Scratch:
        size = num_rows + PADDING_ROWS
        rounded = torch.empty(size * module.quantized_row_bytes(cols), dtype=torch.uint8)
        return cls(num_rows, torch.zeros(size, cols), rounded)


class PanelWeight:
    """One matrix: the rows of several of the extension's `Panels`, concatenated."""

    def __init__(self, panels: Sequence[Any], native: Native) -> None:
        self.panels = list(panels)
        self.native = native
        self._scratch: Scratch | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return sum(panels.rows for panels in self.panels), self.panels[0].cols

    @property
    def nbytes(self) -> int:
        return sum(panels.nbytes for panels in self.panels)

    def matmul(self, x: Any) -> Any:
        if isinstance(x, Value):
            return x.tape.matmul(x, self.panels)
        flat = x.reshape(-1, x.shape[-1]).float()
        out = torch.empty(len(flat), padded(self.shape[0]))[:, : self.shape[0]]
        first = 0
        for panels in self.panels:
            self._multiply(panels, flat, range(len(flat)), out[:, first:])
            first += panels.rows
        return out.reshape(*x.shape[:-1], -1).to(x.dtype) if x.dim() != 2 else out.to(x.dtype)

    def argmax(self, x: Tensor, rows: Sequence[int]) -> tuple[list[int], list[float]]:
        if len(self.panels) > 1:
            return argmax_of_products(self, x, rows)
        return self._multiply(self.panels[0], x, rows, None)

    def _multiply(
        self, panels: Any, x: Tensor, rows: Sequence[int], out: Tensor | None
    ) -> tuple[list[int], list[float]]:
        """Write the products of the given rows of x to `out`. Without `out`, return the argmax and max of each row."""
        if not rows:
            return [], []
        x = x if x.stride(1) == 1 else x.contiguous()
        module = self.native.module
        if self._scratch is None or self._scratch.num_rows < len(rows):
            self._scratch = Scratch.make(module, len(rows), panels.cols)
        argmax: tuple[list[int], list[float]] = module.multiply(
            self.native.isa,
            self.native.threads,
            panels,
            rows,
            (x.data_ptr(), x.stride(0)),
            (self._scratch.values.data_ptr(), panels.cols),
            (self._scratch.rounded.data_ptr(), panels.cols),
            (out.data_ptr(), out.stride(0)) if out is not None else (0, 0),
        )
        return argmax

    def rows(self, index: Any) -> Any:
        if isinstance(index, StepTokens):
            (panels,) = self.panels
            return index.tape.embed(panels, by_position=index.are_positions)
        out = torch.empty(len(index), self.shape[1])
        for panels, local_rows, out_rows in self._split(index):
            unpacked = torch.empty(len(local_rows), self.shape[1])
            panels.unpack_rows(local_rows.data_ptr(), len(local_rows), unpacked.data_ptr())
            out[out_rows] = unpacked
        return out

    def _split(self, index: Tensor) -> list[tuple[Any, Tensor, Tensor]]:
        """For each of the panels: the indexed rows that it holds, counted from its first row, and their output rows."""
        pieces, first = [], 0
        for panels in self.panels:
            out_rows = ((index >= first) & (index < first + panels.rows)).nonzero().flatten()
            pieces.append((panels, (index[out_rows] - first).contiguous(), out_rows))
            first += panels.rows
        return pieces

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        dense: Tensor = self.rows(torch.arange(self.shape[0])).to(dtype)
        return dense


def join(rows: Sequence[int], formats: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Group parts that share panels: neighbours of one format, where all but the last fill whole panels."""
    groups: list[tuple[str, list[int]]] = []
    for index, kind in enumerate(formats):
        if groups and groups[-1][0] == kind and rows[index - 1] % ROWS_IN_PANEL == 0:
            groups[-1][1].append(index)
        else:
            groups.append((kind, [index]))
    return groups
