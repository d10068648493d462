"""The ops of a tape: what each reads and writes, and how it is added to the C++ program.

`tape.py` makes them. While the tape is recorded, it changes the ops that fuse with a neighbour.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.kernels.cpu.native import multiplies_floats
from quire.kernels.cpu.tape_memory import NULL_PART, NULL_VIEW, Columns, Storage

Floats = NDArray[np.float32]


class Op(Protocol):
    def emit(self, program: Any) -> None: ...


@dataclass(slots=True)
class Embed:
    """A row of the matrix for each token, by its id or by its position.

    `first`: the matrix has the rows from there on. Tokens whose rows other ranks have are skipped.
    """

    weight: Any
    by_position: bool
    out: Storage
    scale: float = 1.0
    first: int = 0

    def emit(self, program: Any) -> None:
        program.embed(
            weight=self.weight, first=self.first, by_position=self.by_position, scale=self.scale, out=self.out.view()
        )


@dataclass(slots=True)
class Meet:
    """Waits for the other ranks."""

    ranks: Any

    def emit(self, program: Any) -> None:
        program.meet(self.ranks)


@dataclass(slots=True)
class Round:
    """Rounds columns to int8, into columns of another storage."""

    x: Columns
    quantized: Storage
    width: int

    def emit(self, program: Any) -> None:
        program.round(x=self.x.view(), quantized=self.quantized.quantized_part(self.width))


@dataclass(slots=True)
class Norm:
    """RMSNorm, or LayerNorm if it is centered. Of several `ranks` each computes a part, and a meeting follows."""

    x: Columns
    residual: Columns | None
    sum: Columns | None
    weight: Floats
    bias: Floats | None
    centered: bool
    eps: float
    groups: int
    y: Storage
    quantized: Storage
    rank: int = 0
    ranks: int = 1

    @property
    def rounds(self) -> bool:
        return self.groups == 1

    def emit(self, program: Any) -> None:
        program.norm(
            x=self.x.view(),
            residual=self.residual.view() if self.residual else NULL_VIEW,
            sum=self.sum.view() if self.sum else NULL_VIEW,
            weight=self.weight.ctypes.data,
            bias=self.bias.ctypes.data if self.bias is not None else 0,
            centered=self.centered,
            eps=self.eps,
            groups=self.groups,
            size=len(self.weight),
            y=self.y.view(),
            quantized=self.quantized.quantized(),
            rank=self.rank,
            ranks=self.ranks,
        )


@dataclass(slots=True)
class Matmul:
    """y = x W^T + bias, or with an activation the gated product. With `quantize` it first rounds x to int8."""

    weight: Any
    x: Columns
    quantized: Storage
    quantize: bool
    y: Storage
    first: int
    few_rows: int
    gated: Storage | None = None
    bias: Floats | None = None
    activation: str = ""

    @property
    def rounds(self) -> bool:
        """Whether it writes int8. A dense product does not: the rows of its tiles are others than those of int8."""
        return self.gated is not None and not multiplies_floats(self.weight.format)

    @property
    def width(self) -> str:
        return f"{self.weight.rows}x{self.weight.cols}"

    def emit(self, program: Any) -> None:
        assert self.y.needed or (self.gated is not None and self.gated.needed), "no op reads this product"
        program.matmul(
            weight=self.weight,
            x=self.x.view(),
            quantized=self.quantized.quantized(),
            quantize=self.quantize,
            y=self.y.view(self.first),
            bias=self.bias.ctypes.data if self.bias is not None else 0,
            activation=self.activation,
            gated=self.gated.quantized_part(self.weight.rows // 2) if self.gated and self.rounds else NULL_PART,
            few_rows=self.few_rows,
        )


@dataclass(slots=True)
class Recorded:
    """Any other op: a method of the program and its arguments. `emit` replaces storages and arrays by addresses."""

    method: str
    arguments: dict[str, Any]

    def emit(self, program: Any) -> None:
        getattr(program, self.method)(**{name: resolve_address(value) for name, value in self.arguments.items()})


@dataclass(frozen=True, slots=True)
class Blocks:
    """A layer's keys or values, [blocks, ...]. Between two blocks there may be memory of other layers."""

    items: NDArray[Any]

    def view(self) -> tuple[int, int]:
        """The address of block 0, and the block stride in bytes."""
        assert self.items[0].flags.c_contiguous
        return self.items.ctypes.data, self.items.strides[0]


def resolve_address(value: Any) -> Any:
    if isinstance(value, Columns | Blocks):
        return value.view()
    return value.ctypes.data if isinstance(value, np.ndarray) else value
