"""CodePart: a part of a matrix that a quantization scheme stores as codes with scales.

A scheme (`weights/schemes/`) says how its files store a matrix: a `CodeFormat`, and a `read` function. The rest is the
same for every scheme: dense values for torch, panels for the C++ kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.kernels.cpu.native import Native
from quire.kernels.cpu.tape import address
from quire.layers.source import Part, Shape
from quire.quant.code_format import CodeFormat, CodeRows, dequantize, pack_codes, panel_format
from quire.quant.panels import ROWS_IN_PANEL
from quire.weights.checkpoint import Work

if TYPE_CHECKING:
    from torch import Tensor

SLICE_VALUES = 1 << 20  # codes that one thread reads at a time


@dataclass(frozen=True, slots=True)
class CodePart:
    """Rows of a matrix as codes. It is a `StoredPart`.

    `order` is for schemes that sort the inputs (GPTQ's desc_act): column i of the codes belongs to input `order[i]`.
    `read(start, stop)` returns rows of the part, in ascending order and from any thread.
    """

    part: Part
    cols: int
    tensors: dict[str, Shape]
    nbytes: int
    format: CodeFormat
    read: Callable[[int, int], CodeRows]
    order: NDArray[np.int64] | None = None
    quantized = True

    @property
    def width(self) -> int:
        return self.part.width(self.cols)

    @property
    def panel_format(self) -> str:
        """Panels keep the columns in the order of the inputs, so sorted ones are stored as float32."""
        return "f32" if self.order is not None else panel_format(self.format, self.width)

    def slices(self) -> list[tuple[int, int]]:
        """The rows as (start, stop) slices. All but the last are multiples of a panel's rows."""
        step = max(1, SLICE_VALUES // self.width // ROWS_IN_PANEL) * ROWS_IN_PANEL
        return [(start, min(start + step, self.part.rows)) for start in range(0, self.part.rows, step)]

    def values(self, start: int, stop: int) -> NDArray[np.float32]:
        """The dequantized rows, [rows, width], in the order of the inputs."""
        values = dequantize(self.format, self.read(start, stop))
        if self.order is None:
            return values
        in_order = np.empty_like(values)
        in_order[:, self.order] = values
        return in_order

    def fill(self, out: Tensor) -> list[Work]:
        return [partial(self._fill, out, *rows) for rows in self.slices()]

    def _fill(self, out: Tensor, start: int, stop: int) -> None:
        import torch

        out[start:stop].copy_(torch.from_numpy(self.values(start, stop)))

    def pack(self, panels: Any, first: int, native: Native) -> list[Work]:
        return [partial(self._pack, panels, first, *rows) for rows in self.slices()]

    def _pack(self, panels: Any, first: int, start: int, stop: int) -> None:
        if self.order is None:
            pack_codes(panels, first + start, self.format, self.read(start, stop))
        else:
            values = self.values(start, stop)
            panels.pack_dense("f32", address(values), panels.cols, first + start, stop - start)

    def unpack(self, native: Native) -> NDArray[np.float32]:
        raise AssertionError("a vector is not stored as codes")
