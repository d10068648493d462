"""Source: provides the weights of layers, from a checkpoint or from random numbers, or only lists their declarations.

A layer declares each matrix as `Part`s, whose rows are concatenated. Names and layout are those of a Hugging Face
checkpoint ("model.layers.0.mlp.down_proj.weight"); readers of other formats translate them. How a part is stored
(dense, in GGUF blocks, by a quantization scheme) is not declared: `weights/checkpoint.py` finds it in the file. A model
built from a source is ready to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from quire.errors import UnsupportedModel
from quire.kernels.arrays import Array
from quire.quant.weight import Weight

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a matrix (or entries of a vector) that lie in one tensor of a checkpoint.

    A stored tensor may hold several parts. If they are concatenated, `offset` is this part's first row. If rows are
    stored in another order, `order` lists them as ranges of stored rows. `transposed` tensors are stored as (in, out),
    as GPT-2's are. Tensor parallelism splits the part by `split`, in multiples of `unit`.
    """

    name: str
    rows: int
    offset: int = 0
    fused_rows: int | None = None  # of the stored tensor, if it holds more than this part
    order: tuple[range, ...] | None = None  # None: from `offset` on
    transposed: bool = False
    split: Literal["rows", "columns"] | None = None  # None: every rank has the whole part
    unit: int = 1  # rows or columns that are not split: those of a head
    columns: range | None = None  # None: all
    expert: tuple[int, int] | None = None  # of a mixture, or a head of many: its index, and their number
    stacked: bool = False  # the stored tensor has all experts or heads: its first axis is theirs

    @property
    def stored_rows(self) -> int:
        return self.rows if self.fused_rows is None else self.fused_rows

    def stored_shape(self, cols: int | None) -> Shape:
        """The stored tensor's shape, for a matrix of `cols` columns or, with None, a vector."""
        stack = (self.expert[1],) if self.stacked and self.expert else ()
        if cols is None:
            return (*stack, self.stored_rows)
        return (*stack, cols, self.stored_rows) if self.transposed else (*stack, self.stored_rows, cols)

    def width(self, cols: int) -> int:
        return cols if self.columns is None else len(self.columns)

    def stored_runs(self, start: int, stop: int) -> tuple[range, ...]:
        """The stored rows of this part's rows from `start` to `stop`."""
        runs, first = [], 0
        for run in self.order or (range(self.offset, self.offset + self.rows),):
            if piece := run[max(start - first, 0) : max(stop - first, 0)]:
                runs.append(piece)
            first += len(run)
        return tuple(runs)

    def tensor(self, kind: str) -> Part:
        """The part of a layer's "weight" or "bias" tensor. This part has the name of the layer."""
        return replace(self, name=f"{self.name}.{kind}")

    def in_plain_order(self) -> Part:
        """The same part in a format that stores parts concatenated and not transposed."""
        return replace(self, order=None, transposed=False)

    def only(self, rows: range) -> Part:
        """Some of the part's rows."""
        if rows == range(self.rows):
            return self
        runs, offset = self.stored_runs(rows.start, rows.stop), self.offset + rows.start
        return replace(self, rows=len(rows), offset=offset, fused_rows=self.stored_rows, order=runs)

    def shard(self, rank: int, size: int, cols: int | None) -> Part:
        """The shard of rank `rank` of `size`. `cols` is None for a vector, whose columns cannot be split."""
        if self.split == "rows":
            return self.only(self._share(rank, size, self.rows))
        if self.split == "columns" and cols is not None:
            return replace(self, columns=self._share(rank, size, cols))
        return self

    def _share(self, rank: int, size: int, count: int) -> range:
        """An equal share of the units. Fewer units than ranks are replicated: ranks 0 and 1 of 4 have unit 0 of 2."""
        units = count // self.unit
        if units % size == 0 and units * self.unit == count:
            share = count // size
            return range(rank * share, (rank + 1) * share)
        if units and units * self.unit == count and size % units == 0:
            unit = rank * units // size
            return range(unit * self.unit, (unit + 1) * self.unit)
        raise UnsupportedModel(
            f"{self.name} has {count} {self.split} in units of {self.unit}, which cannot be split over {size} devices. "
            "Use another number of devices."
        )


def fused_parts(part: Part, sizes: Sequence[int], num_groups: int = 1) -> list[Part]:
    """The parts of one stored tensor: copies of `part` with their own rows and order.

    With several groups, the tensor stores group after group, each with its rows of every part: q, k and v of the first
    head, then of the second, as in BLOOM and Falcon.
    """
    total, group = sum(sizes), sum(sizes) // num_groups
    parts, offset = [], 0
    for size in sizes:
        run, first = size // num_groups, offset // num_groups
        assert run * num_groups == size, (size, num_groups)
        order = tuple(range(start + first, start + first + run) for start in range(0, total, group))
        parts.append(replace(part, rows=size, offset=offset, fused_rows=total, order=order))
        offset += size
    return parts


class Source(Protocol):
    def matrix(self, parts: Sequence[Part], cols: int) -> Weight:
        """One matrix [sum of rows, cols] whose rows are those of the parts, concatenated."""
        ...

    def vector(self, parts: Sequence[Part], *, plus_one: bool = False) -> Array:
        """One dense vector, the parts concatenated: norm weights and biases. `plus_one` adds 1 to each value."""
        ...

    def scalar(self, value: float) -> Array | float:
        """A number in the weights' type."""
        ...


@dataclass(frozen=True, slots=True)
class ShardedSource:
    """One rank's shard of another source. Each part is split while it is read."""

    whole: Source
    rank: int
    size: int

    def matrix(self, parts: Sequence[Part], cols: int) -> Weight:
        return self.whole.matrix([part.shard(self.rank, self.size, cols) for part in parts], cols)

    def vector(self, parts: Sequence[Part], *, plus_one: bool = False) -> Array:
        return self.whole.vector([part.shard(self.rank, self.size, None) for part in parts], plus_one=plus_one)

    def scalar(self, value: float) -> Array | float:
        return self.whole.scalar(value)
