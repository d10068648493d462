"""Outputs: the files of a quantized model, as a GGUF file or as a Hugging Face directory.

A step of the job stores tensors under the names that the file has, in the file's order of rows (`Rows`). `finish` joins
the steps' files. Nothing of the model is in memory then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.errors import UnsupportedModel
from quire.layers.source import Part
from quire.models.config import ModelConfig
from quire.quant.ggml_types import GGMLType
from quire.quantize.gguf_writer import TensorEntry, write_gguf
from quire.quantize.tensors import StepFile, Tensor, all_tensors, dense_tensor, header_of
from quire.weights.experts import gguf_part, safetensors_part
from quire.weights.family_names import file_name
from quire.weights.names import gguf_name, safetensors_name
from quire.weights.safetensors import INDEX, SINGLE

Floats = NDArray[np.float32]

MAX_SHARD_BYTES = 5 << 30


@dataclass(frozen=True, slots=True)
class Rows:
    """The order of the rows of queries and keys, where the source and the file rotate other pairs of dimensions."""

    head_dim: int
    interleave: bool | None  # None: as they are

    @classmethod
    def between(cls, config: ModelConfig, interleaved: bool) -> Rows:
        if config.rope.interleaved == interleaved:
            return cls(config.head_dim, None)
        if config.rope.dim != config.head_dim:
            raise UnsupportedModel(
                f"Only {config.rope.dim} of {config.head_dim} dimensions of a head rotate, and quire cannot reorder "
                "these. Choose a format of the same kind of file: gguf:... for a GGUF file, another for a directory."
            )
        return cls(config.head_dim, interleaved)

    def order(self, name: str, count: int) -> NDArray[np.int64] | None:
        """The source's row for each row of the file, or None if they are the same."""
        if self.interleave is None or name.split(".")[-2] not in ("q_proj", "k_proj"):
            return None
        half = self.head_dim // 2
        rows = np.arange(count).reshape(-1, *((2, half) if self.interleave else (half, 2)))
        return rows.swapaxes(1, 2).ravel()


def directory_name(part: Part, family: str) -> str:
    stored = safetensors_part(part, family)
    if stored.stacked:
        raise UnsupportedModel(
            f"Directories of the family {family!r} have all experts of a layer in one tensor, and no format has codes "
            "for such tensors. Start from a GGUF file of the model, and choose gguf:...."
        )
    return file_name(safetensors_name(stored.name, family), family)


class Output(Protocol):
    @property
    def rows(self) -> Rows: ...

    def matrix(self, part: Part, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a quantized matrix, by their names in the file."""
        ...

    def dense(self, part: Part, values: Floats) -> dict[str, Tensor]:
        """A matrix that stays dense."""
        ...

    def vector(self, part: Part, values: Floats) -> dict[str, Tensor]: ...

    def joined(self, tensors: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The tensors of several parts. What a file has in one tensor is concatenated."""
        ...

    def finish(self, directory: Path, steps: Sequence[StepFile]) -> None:
        """Write all files into a directory."""
        ...


@dataclass(frozen=True, slots=True)
class GGUFOutput:
    """One GGUF file. `metadata` are its entries, each with its type and value as stored."""

    file_name: str
    family: str
    rows: Rows
    metadata: Mapping[str, bytes]
    more: Mapping[str, Tensor]  # tensors that belong to no layer: rope_freqs

    def matrix(self, part: Part, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {self._name(part): in_stack(part, tensors[""])}

    def dense(self, part: Part, values: Floats) -> dict[str, Tensor]:
        """Matrices of one row are vectors in GGUF files."""
        return {self._name(part): dense_tensor(values[0] if len(values) == 1 else values, "F32")}

    def vector(self, part: Part, values: Floats) -> dict[str, Tensor]:
        return {self._name(part): in_stack(part, dense_tensor(values, "F32"))}

    def _name(self, part: Part) -> str:
        return gguf_name(gguf_part(part, 0)[0].name, self.family)

    def joined(self, tensors: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Experts and heads come in order."""
        found: dict[str, list[Tensor]] = {}
        for each in tensors:
            for name, tensor in each.items():
                found.setdefault(name, []).append(tensor)
        return {name: stack(parts) if len(parts) > 1 else parts[0] for name, parts in found.items()}

    def finish(self, directory: Path, steps: Sequence[StepFile]) -> None:
        found = [
            TensorEntry(name, GGMLType[dtype], shape, step.nbytes(name), partial(step.copy, name))
            for step, name, dtype, shape in all_tensors(steps)
        ]
        found += [
            TensorEntry(name, GGMLType[each.dtype], each.shape, each.data.nbytes, partial(write, each))
            for name, each in self.more.items()
        ]
        write_gguf(directory / self.file_name, self.metadata, found)


def in_stack(part: Part, tensor: Tensor) -> Tensor:
    """With a first axis for the experts or heads, if the file has them in one tensor."""
    return Tensor(tensor.dtype, (1, *tensor.shape), tensor.data) if gguf_part(part, 0)[0].stacked else tensor


def stack(parts: Sequence[Tensor]) -> Tensor:
    shape = (len(parts), *parts[0].shape[1:])
    return Tensor(parts[0].dtype, shape, np.concatenate([part.data for part in parts]))


def write(tensor: Tensor, file: Any) -> None:
    file.write(tensor.data.data.cast("B"))


@dataclass(frozen=True, slots=True)
class DirectoryOutput:
    """config.json, safetensors and the tokenizer's files. `texts` are further files by name."""

    family: str
    rows: Rows
    dtype: str  # of tensors that stay dense, in safetensors' notation
    config: Mapping[str, Any]
    texts: Mapping[str, bytes]
    norm_offset: float = 0.0  # what is subtracted from norms: Gemma's are stored less 1

    def matrix(self, part: Part, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        stem = directory_name(part, self.family).removesuffix("weight")
        return {f"{stem}{suffix}": tensor for suffix, tensor in tensors.items()}

    def dense(self, part: Part, values: Floats) -> dict[str, Tensor]:
        return {directory_name(part, self.family): dense_tensor(values, self.dtype)}

    def vector(self, part: Part, values: Floats) -> dict[str, Tensor]:
        """A correction of scores decides which experts are chosen, so it is not rounded."""
        is_norm, is_exact = part.name.endswith("norm.weight"), part.name.endswith("e_score_correction_bias")
        stored = values - np.float32(self.norm_offset) if is_norm else values
        return {directory_name(part, self.family): dense_tensor(stored, "F32" if is_exact else self.dtype)}

    def joined(self, tensors: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {name: tensor for each in tensors for name, tensor in each.items()}

    def finish(self, directory: Path, steps: Sequence[StepFile]) -> None:
        shards = split_shards([(step, name, step.nbytes(name)) for step, name, _, _ in all_tensors(steps)])
        names = shard_names(len(shards))
        for shard_name, tensors in zip(names, shards, strict=True):
            write_shard(directory / shard_name, tensors)
        if len(shards) > 1:
            placed = {name: file for file, tensors in zip(names, shards, strict=True) for _, name, _ in tensors}
            total = sum(size for tensors in shards for _, _, size in tensors)
            write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": placed})
        for text_name, text in self.texts.items():
            (directory / text_name).write_bytes(text)
        write_json(directory / "config.json", self.config)


Placed = tuple[StepFile, str, int]


def split_shards(tensors: Sequence[Placed], most: int = MAX_SHARD_BYTES) -> list[list[Placed]]:
    shards: list[list[Placed]] = [[]]
    size = 0
    for placed in tensors:
        if shards[-1] and size + placed[2] > most:
            shards.append([])
            size = 0
        shards[-1].append(placed)
        size += placed[2]
    return shards


def shard_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    return [f"model-{nth + 1:05}-of-{count:05}.safetensors" for nth in range(count)]


def write_shard(path: Path, tensors: Sequence[Placed]) -> None:
    described = [(name, *step.tensors[name], size) for step, name, size in tensors]
    with path.open("wb") as file:
        file.write(header_of(described, {"format": "pt"}))
        for step, name, _ in tensors:
            step.copy(name, file)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
