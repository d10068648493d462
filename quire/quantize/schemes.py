"""Schemes: how a matrix becomes the tensors of a format. One class a format.

`quantize` gets the values of one part [rows, cols] and the statistics of its inputs. It returns the tensors of the file
and the values that they stand for. `needs` says which statistics. What a scheme makes of a whole layer before that
(AWQ's scales) is in `awq.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.errors import UnsupportedModel
from quire.kernels.cpu.native import Native
from quire.quant.ggml_types import GGMLType
from quire.quantize.rounding import (
    dequantize_blocks,
    quantize_blocks,
    recode_blocks,
)
from quire.quantize.statistics import InputStatistics, Needs
from quire.quantize.tensors import Tensor, dense_tensor, rounded

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Quantized:
    """The tensors of a part by the suffix of their names, their values in float32, and their bits."""

    tensors: dict[str, Tensor]
    values: Floats

    @property
    def nbytes(self) -> int:
        return sum(tensor.data.nbytes for tensor in self.tensors.values())


class Scheme(Protocol):
    @property
    def needs(self) -> Needs: ...

    @property
    def follows(self) -> bool:
        """Whether a layer is quantized for the inputs that the quantized layers before it give."""
        ...

    def check(self, name: str, rows: int, cols: int) -> None:
        """Raise if a matrix of that shape cannot be stored."""
        ...

    def quantize(self, name: str, values: Floats, statistics: InputStatistics | None) -> Quantized: ...

    def config(self) -> dict[str, Any]:
        """The quantization_config of config.json; empty for dense matrices."""
        ...


def check_multiple(name: str, what: str, size: int, unit: int, format: str) -> None:
    if size % unit:
        raise UnsupportedModel(
            f"{name} has {size:,} {what}, and {format} needs a multiple of {unit}. Choose another format or group size."
        )


@dataclass(frozen=True, slots=True)
class Blocks:
    """GGUF blocks. `types` gives the type of each matrix by its name."""

    native: Native
    types: Mapping[str, GGMLType]
    needs: Needs
    follows = False

    def check(self, name: str, rows: int, cols: int) -> None:
        check_multiple(name, "columns", cols, self.types[name].block_size, self.types[name].name)

    def quantize(self, name: str, values: Floats, statistics: InputStatistics | None) -> Quantized:
        type = self.types[name]
        if not type.quantized:
            halves = values.astype("<f2")
            return Quantized({"": Tensor(type.name, values.shape, halves)}, halves.astype(np.float32))
        blocks = quantize_blocks(self.native, type, values, None if statistics is None else statistics.mean_squares)
        if statistics is not None and statistics.moments is not None and type is not GGMLType.Q8_0:
            blocks = recode_blocks(self.native, type, blocks, values, statistics.moments)
        dense = dequantize_blocks(self.native, type, blocks, values.shape[1])
        return Quantized({"": Tensor(type.name, values.shape, blocks)}, dense)

    def config(self) -> dict[str, Any]:
        raise AssertionError("GGUF files have no quantization_config")


@dataclass(frozen=True, slots=True)
class Half:
    """Dense matrices in float16: a conversion between kinds of files."""

    needs: Needs = "nothing"
    follows = False

    def check(self, name: str, rows: int, cols: int) -> None:
        """Any shape can be stored."""

    def quantize(self, name: str, values: Floats, statistics: InputStatistics | None) -> Quantized:
        return Quantized({"weight": dense_tensor(values, "F16")}, rounded(values, "F16"))

    def config(self) -> dict[str, Any]:
        return {}
