"""PanelWeight: a matrix packed for the C++ kernels. `csrc/panels.h` describes the layout.

A fused matrix of several formats (q, k and v of mixed types) is several `Panels`, whose outputs are concatenated.
`weights/checkpoint.py` and `weights/random_weights.py` fill them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.kernels.cpu.native import DENSE_FORMATS, Native, multiplies_floats
from quire.kernels.cpu.recorded import StepTokens
from quire.kernels.cpu.tape import Value, address
from quire.kernels.cpu.tape_memory import PADDING_ROWS, padded

Floats = NDArray[np.float32]
Order = NDArray[np.int64]
ExpertOrders = NDArray[np.int32]  # [experts, cols]
Kind = TypeVar("Kind")

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
    values: Floats
    rounded: NDArray[np.uint8]

    @classmethod
    def make(cls, module: Any, num_rows: int, cols: int) -> Scratch:
        size = num_rows + PADDING_ROWS
        rounded = np.empty(size * module.quantized_row_bytes(cols), np.uint8)
        return cls(num_rows, np.zeros((size, cols), np.float32), rounded)


class PanelWeight:
    """One matrix: the rows of several of the extension's `Panels`, concatenated. Tensors are numpy arrays."""

    data = None

    def __init__(
        self,
        panels: Sequence[Any],
        native: Native,
        orders: Sequence[Order | None] = (),
        expert_orders: ExpertOrders | None = None,
    ) -> None:
        """`orders[i]`: column j of panels i belongs to input orders[i][j]. None: in order. `expert_orders` are those of
        the experts in one weight; the op `experts` reads them."""
        self.expert_orders = expert_orders
        self.panels = list(panels)
        self.orders = list(orders) or [None] * len(self.panels)
        self.native = native
        for each in panels:
            native.few_rows(each.format)  # measured now, not in a step
        self._scratch: Scratch | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return sum(panels.rows for panels in self.panels), self.panels[0].cols

    @property
    def nbytes(self) -> int:
        return sum(panels.nbytes for panels in self.panels)

    @property
    def reads_rounded(self) -> bool:
        """Whether a product reads its input in int8 only, and in order."""
        is_quantized = not any(multiplies_floats(panels.format) for panels in self.panels)
        return is_quantized and all(order is None for order in self.orders)

    def matmul(self, x: Any) -> Any:
        if isinstance(x, Value):
            return x.tape.matmul(x, self.panels, self.orders)
        out = np.empty((len(x), padded(self.shape[0])), np.float32)[:, : self.shape[0]]
        self.multiply(x, out)
        return out

    def multiply(self, x: Floats, out: Floats) -> None:
        """Write the products with x [n, in] to `out` [n, out or more]."""
        first = 0
        for panels, order in zip(self.panels, self.orders, strict=True):
            self._multiply(panels, order, x, range(len(x)), out[:, first:])
            first += panels.rows

    def argmax(self, x: Floats, rows: Sequence[int]) -> tuple[list[int], list[float]]:
        if len(self.panels) == 1:
            return self._multiply(self.panels[0], self.orders[0], x, rows, None)
        products = self.matmul(x[list(rows)])
        index = np.where(np.isnan(products), np.inf, products).argmax(-1)
        return index.tolist(), products[np.arange(len(products)), index].tolist()

    def _multiply(
        self, panels: Any, order: Order | None, x: Floats, rows: Sequence[int], out: Floats | None
    ) -> tuple[list[int], list[float]]:
        """Write the products of the given rows of x to `out`. Without `out`, return the argmax and max of each row."""
        if not rows:
            return [], []
        assert x.dtype == np.float32
        x = x if order is None else x[:, order]
        x = x if x.strides[1] == 4 else np.ascontiguousarray(x)
        module = self.native.module
        if self._scratch is None or self._scratch.num_rows < len(rows):
            self._scratch = Scratch.make(module, len(rows), panels.cols)
        argmax: tuple[list[int], list[float]] = module.multiply(
            self.native.isa,
            self.native.threads,
            self.native.few_rows(panels.format),
            panels,
            rows,
            (address(x), x.strides[0] // 4),
            (address(self._scratch.values), panels.cols),
            (address(self._scratch.rounded), panels.cols),
            (address(out), out.strides[0] // 4) if out is not None else (0, 0),
        )
        return argmax

    def rows(self, index: Any) -> Any:
        if isinstance(index, StepTokens):
            (panels,) = self.panels
            assert self.orders == [None]
            return index.tape.embed(panels, by_position=index.are_positions)
        out = np.empty((len(index), self.shape[1]), np.float32)
        first = 0
        for panels, order in zip(self.panels, self.orders, strict=True):
            out_rows = np.flatnonzero((index >= first) & (index < first + panels.rows))
            local_rows = np.ascontiguousarray(index[out_rows] - first, np.int64)
            unpacked = np.empty((len(local_rows), self.shape[1]), np.float32)
            panels.unpack_rows(address(local_rows), len(local_rows), address(unpacked))
            if order is not None:
                unpacked[:, order] = unpacked.copy()
            out[out_rows] = unpacked
            first += panels.rows
        if self.expert_orders is not None:
            experts = index // (self.shape[0] // len(self.expert_orders))
            np.put_along_axis(out, self.expert_orders[experts], out.copy(), axis=1)
        return out

    def dense(self) -> Floats:
        dense: Floats = self.rows(np.arange(self.shape[0]))
        return dense


def join(rows: Sequence[int], formats: Sequence[Kind], unit: int = ROWS_IN_PANEL) -> list[tuple[Kind, list[int]]]:
    """Group parts that share panels: neighbours of one format, where all but the last are multiples of `unit` rows."""
    groups: list[tuple[Kind, list[int]]] = []
    for index, kind in enumerate(formats):
        if groups and groups[-1][0] == kind and rows[index - 1] % unit == 0:
            groups[-1][1].append(index)
        else:
            groups.append((kind, [index]))
    return groups
