"""Scheme: a quantization method of safetensors checkpoints. Module: the tensors that such a file has for one matrix.

A scheme says how a matrix is stored: a `CodeMatrix`, from the configuration and the headers of the files. It reads
values only where the description depends on them, such as GPTQ's order of inputs. Everything that a file can get wrong
is refused here, before memory is allocated. `code_part.py` does the rest for every scheme.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.errors import BadModelFile, UnsupportedModel
from quire.layers.source import Shape
from quire.quant.code_format import CodeFormat, CodeRows
from quire.weights.safetensors import SafetensorsFiles

FLOAT_SCALES = ("F16", "BF16", "F32")
ScaleType = Literal["f16", "bf16", "f32"]
SCALE_TYPES: dict[str, ScaleType] = {"F16": "f16", "BF16": "bf16", "F32": "f32"}

Codes = NDArray[np.uint8]
Rows = slice | NDArray[np.int64]  # of the stored matrix


@dataclass(frozen=True, slots=True)
class CodeMatrix:
    """A whole matrix as the files store it. `order`: column i of the codes belongs to input order[i]."""

    tensors: dict[str, Shape]  # all that hold it, with the shapes that they must have
    format: CodeFormat
    read: Callable[[Rows], CodeRows]
    order: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class Module:
    """The tensors of one linear layer of `rows` outputs and `cols` inputs. `kind` is the last part of a name."""

    files: SafetensorsFiles
    name_in_files: Callable[[str], str]  # of a canonical name
    name: str  # canonical: model.layers.0.mlp.up_proj
    rows: int
    cols: int

    def stored_name(self, kind: str) -> str:
        first, dot, rest = kind.partition(".")  # "weight.absmax" is named as the weight is
        return self.name_in_files(f"{self.name}.{first}") + dot + rest

    @property
    def names(self) -> set[str]:
        """The canonical name and that of the files: rules of a configuration have the latter."""
        kind = next((kind for kind in ("weight", "qweight", "weight_packed") if self.has(kind)), "weight")
        return {self.name, self.stored_name(kind).removesuffix(f".{kind}")}

    def has(self, kind: str) -> bool:
        return self.stored_name(kind) in self.files.tensors

    def shape(self, kind: str) -> Shape:
        return self.files.tensors[self.stored_name(kind)].shape

    def dtype(self, kind: str) -> str:
        return self.files.tensors[self.stored_name(kind)].dtype

    def fits(self, kind: str, shape: Shape, types: Collection[str]) -> bool:
        """Whether the file has such a tensor. One of another type is refused; `survey.check` reports other shapes."""
        if not self.has(kind):
            return False
        if self.dtype(kind) not in types:
            raise self.bad(f"{kind} is of type {self.dtype(kind)} instead of {' or '.join(types)}")
        return self.shape(kind) == shape

    def read(self, kind: str) -> NDArray[Any]:
        return self.files.read(self.stored_name(kind))

    def read_floats(self, kind: str) -> NDArray[np.float32]:
        """The values exactly, as float32."""
        return widen(self.read(kind), self.dtype(kind))

    def bad(self, problem: str) -> BadModelFile:
        return BadModelFile(f"{self.files.directory}, {self.name}: {problem}. Download the model again.")

    def unsupported(self, problem: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.files.directory}, {self.name}: {problem}.")

    def num_groups(self, group: int) -> int:
        if self.cols % group:
            raise self.bad(f"groups of {group} do not divide the {self.cols} inputs")
        return self.cols // group

    def scale_type(self, kind: str) -> ScaleType:
        """The type of the scales; float32 where the file has none, which `survey.check` reports."""
        return SCALE_TYPES.get(self.dtype(kind), "f32") if self.has(kind) else "f32"


class Scheme(Protocol):
    def matrix(self, module: Module) -> CodeMatrix | None:
        """How the files store a linear layer's weight, or None if it is a plain tensor."""
        ...

    def may_stay_unread(self, name: str, files: SafetensorsFiles) -> bool:
        """Whether files may have this tensor although quire does not use it."""
        ...


def widen(values: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Stored floats as float32, exactly. bfloat16 and float8 are read as unsigned integers."""
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def unpack_bits(words: NDArray[np.uint32], bits: int) -> Codes:
    """Codes of `bits` bits, the lowest first: [n, words] -> [n, 32 * words / bits]. 3-bit codes cross words."""
    raw = np.ascontiguousarray(words, "<u4").view(np.uint8)
    if bits == 8:
        return raw
    if bits == 3:
        bits_of_rows = np.unpackbits(raw, axis=1, bitorder="little")[:, : raw.shape[1] * 8 // 3 * 3]
        octets = bits_of_rows.reshape(len(raw), -1, 3)
        threes: Codes = octets[..., 0] | octets[..., 1] << np.uint8(1) | octets[..., 2] << np.uint8(2)
        return threes
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes: Codes = ((raw[:, :, None] >> shifts) & np.uint8((1 << bits) - 1)).reshape(len(raw), -1)
    return codes


def unpack_nibbles(raw: Codes, *, high_first: bool = False) -> Codes:
    """Two codes a byte: [n, bytes] -> [n, 2 * bytes]."""
    low, high = raw & np.uint8(15), raw >> np.uint8(4)
    pair = (high, low) if high_first else (low, high)
    return np.stack(pair, axis=-1).reshape(len(raw), -1)
