"""Units: the matrices that a job quantizes, one by one.

Most are parts of the layers' matrices. The keys and values of latent attention are two matrices of the layer and one
tensor in a directory (`kv_b_proj`), and one matrix for each head in a GGUF file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.layers.source import Part
from quire.weights.experts import EXPERT, is_head

Floats = NDArray[np.float32]

ROUTERS = ("gate", "shared_expert_gate")  # they choose experts: small, and every format keeps them dense


@dataclass(frozen=True, slots=True)
class Unit:
    """`key` is its name in the job, `cols` are the columns of the tensor that it is taken from."""

    key: str
    part: Part
    cols: int

    @property
    def name(self) -> str:
        return self.part.name

    @property
    def shape(self) -> tuple[int, int]:
        return self.part.rows, self.part.width(self.cols)

    @property
    def is_router(self) -> bool:
        return self.name.split(".")[-2] in ROUTERS

    @property
    def expert(self) -> tuple[int, str] | None:
        """The index of its expert, and gate, up or down."""
        match = EXPERT.fullmatch(self.name)
        return (self.part.expert[0], match[3]) if match and self.part.expert else None

    def beside(self, kind: str) -> str:
        """The key of another matrix of the same expert."""
        return f"{self.name.rpartition('.')[0].rpartition('.')[0]}.{kind}_proj.weight"


def units_of(parts: Sequence[Part], cols: int, *, by_head: bool) -> list[Unit]:
    """`by_head`: the output has a matrix for each head of latent attention."""
    first = parts[0]
    if not is_head(first):
        return [Unit(part.name, part, cols) for part in parts]
    if by_head:
        kind = "keys" if first.transposed else "values"
        return [Unit(f"{part.name} ({kind} {nth})", part, cols) for nth, part in enumerate(parts)]
    return [Unit(first.name, Part(first.name, cols), first.rows)] if first.transposed else []


def take_head(part: Part, whole: Floats) -> Floats:
    """A head's keys, transposed, or its values, out of `kv_b_proj`."""
    if part.columns is not None:
        return whole[part.columns.start : part.columns.stop].T
    return whole[part.offset : part.offset + part.rows]
