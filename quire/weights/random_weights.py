"""Random weights: `Source`s that draw from a seed instead of reading a file, for benchmarks and tests.

A tensor's values depend only on the seed, its name and the kind of device: neither on the order of calls nor on fusing.
Matrices are normal with std 1 / sqrt(cols), so the scale of activations does not
change over the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.kernels.arrays import Array
from quire.kernels.cpu.native import Native
from quire.kernels.cpu.tape import address
from quire.layers.source import Part
from quire.quant.panels import PanelWeight, rounded_format

VECTOR_STD = 0.05  # of norm weights around one, and of biases around zero


class RandomPanels:
    """For quire's own CPU kernels. Matrices are quantized in the same way as a checkpoint's."""

    def __init__(self, seed: int, native: Native, quantize: str | None = None) -> None:
        self.seed = seed
        self.nbytes = 0
        self._native = native
        self._quantize = quantize

    def matrix(self, parts: Sequence[Part], cols: int) -> PanelWeight:
        values = np.concatenate([draw(self.seed, part, cols, 0.0, cols**-0.5) for part in parts])
        rows, width = values.shape
        panels = self._native.module.Panels(rounded_format("f32", parts[0].name, width, self._quantize), rows, width)
        panels.pack_dense("f32", address(values), width, 0, rows)
        weight = PanelWeight([panels], self._native)
        self.nbytes += weight.nbytes
        return weight

    def vector(self, parts: Sequence[Part], *, plus_one: bool = False) -> Any:
        values = np.concatenate([draw(self.seed, part, None, vector_mean(part), VECTOR_STD) for part in parts])
        self.nbytes += values.nbytes
        return values + np.float32(1.0) if plus_one else values

    def scalar(self, value: float) -> float:
        return float(np.float32(value))


def draw(seed: int, part: Part, cols: int | None, mean: float, std: float) -> NDArray[np.float32]:
    """The whole tensor is drawn and the part is taken from it, so that the values do not depend on the split."""
    generator = np.random.Generator(np.random.Philox(key=tensor_seed(seed, part.name)))
    whole = generator.standard_normal(stored_shape(part, cols), np.float32)
    whole *= np.float32(std)
    whole += np.float32(mean)
    rows = np.concatenate(select_rows(whole, part))
    return np.ascontiguousarray(rows if cols is None else rows[:, columns_of(part)])


def vector_mean(part: Part) -> float:
    return 0.0 if part.name.endswith(".bias") else 1.0


def stored_shape(part: Part, cols: int | None) -> tuple[int, ...]:
    return (part.stored_rows,) if cols is None else (part.stored_rows, cols)


def select_rows(whole: Array, part: Part) -> list[Array]:
    return [whole[run.start : run.stop : run.step] for run in part.stored_runs(0, part.rows)]


def columns_of(part: Part) -> slice:
    return slice(None) if part.columns is None else slice(part.columns.start, part.columns.stop)


def tensor_seed(seed: int, name: str) -> int:
    digest = blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
