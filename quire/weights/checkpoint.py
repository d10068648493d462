"""Checkpoints as a source of weights: what a model asks for by canonical name, out of GGUF or safetensors files.

A `Checkpoint` says what is in the files and fills tensors from them; `CheckpointSource` fuses, places and casts, and is
what a model is built from. Whether the files and the model fit is `survey.py`'s; who calls all this is `loader.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.quant.gguf_blocks import GGUFBlocks, check_supported
from quire.quant.weight import Dense, Stacked, Weight
from quire.weights.gguf import GGUFFile
from quire.weights.names import gguf_name, text_name
from quire.weights.safetensors import SafetensorsFiles

SLICE_BYTES = 1 << 22  # of a file, held in memory at a time while its tensors are unpacked

Parts = Sequence[tuple[str, int]]


class Checkpoint(Protocol):
    """Tensors in files, by canonical name."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor there is, under the names that the files use."""
        ...

    def own_name(self, name: str) -> str:
        """What the files call the tensor with that canonical name."""
        ...

    def nbytes(self, name: str) -> int:
        """Bytes of the tensor in the file."""
        ...

    def fill(self, name: str, out: Tensor) -> None:
        """Write the tensor, dense, into `out` [rows, cols], in out's dtype and on its device."""
        ...

    def packed(self, name: str, device: torch.device, dtype: torch.dtype) -> GGUFBlocks | None:
        """The tensor in the blocks that it is stored in, or None if it is stored plainly."""
        ...


class GGUFCheckpoint:
    """The tensors of a GGUF file."""

    def __init__(self, file: GGUFFile, family: str) -> None:
        self.file = file
        self.family = family

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: info.shape for name, info in self.file.tensors.items()}

    def own_name(self, name: str) -> str:
        return gguf_name(name, self.family)

    def nbytes(self, name: str) -> int:
        return self.file.tensors[self.own_name(name)].nbytes

    def fill(self, name: str, out: Tensor) -> None:
        info = self.file.tensors[self.own_name(name)]
        check_supported(info.type)
        for rows, data in self._slices(info.name):
            GGUFBlocks(info.type, data.to(out.device), info.cols).dense_into(out[rows])

    def packed(self, name: str, device: torch.device, dtype: torch.dtype) -> GGUFBlocks | None:
        info = self.file.tensors[self.own_name(name)]
        if not info.type.quantized:
            return None
        data = torch.empty(info.rows, info.type.row_bytes(info.cols), dtype=torch.uint8, device=device)
        blocks = GGUFBlocks(info.type, data, info.cols, dtype)
        for rows, part in self._slices(info.name):
            data[rows] = part
        return blocks

    def _slices(self, name: str) -> Iterator[tuple[slice, Tensor]]:
        """The tensor's bytes, some rows at a time; a slice's pages are given back when the next one is asked for."""
        raw = self.file.raw(name)
        step = max(1, SLICE_BYTES // raw.shape[1])
        for start in range(0, raw.shape[0], step):
            end = min(start + step, raw.shape[0])
            yield slice(start, end), torch.from_numpy(np.array(raw[start:end]))
            self.file.release(name, start, end)


class SafetensorsCheckpoint:
    """The tensors of a Hugging Face directory."""

    def __init__(self, files: SafetensorsFiles) -> None:
        self.files = files
        self._own = {text_name(name): name for name in files.tensors}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: stored.shape for name, stored in self.files.tensors.items()}

    def own_name(self, name: str) -> str:
        return self._own.get(name, name)

    def nbytes(self, name: str) -> int:
        return self.files.tensors[self.own_name(name)].nbytes

    def fill(self, name: str, out: Tensor) -> None:
        out.copy_(self.files.read(self.own_name(name)).view(out.shape))

    def packed(self, name: str, device: torch.device, dtype: torch.dtype) -> GGUFBlocks | None:
        return None


class CheckpointSource:
    """A `Source` over a checkpoint that has been found to fit (`survey.check`).

    With `packed`, tensors stored in quantized blocks stay in them; all others, and all of them without it, become dense
    in `dtype`. `on_read` is told the bytes of each tensor once it is in place.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        *,
        packed: bool = False,
        on_read: Callable[[int], None] | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device
        self.keep_packed = packed
        self.on_read = on_read

    def matrix(self, parts: Parts, cols: int) -> Weight:
        weights = [self._packed(name) for name, _ in parts] if self.keep_packed else []
        blocks = [weight for weight in weights if weight is not None]
        if len(blocks) == len(parts):
            self._report(parts)
            return stack(blocks)
        return Dense(self._dense(parts, cols))

    def vector(self, parts: Parts) -> Tensor:
        return self._dense(parts, 1, flat=True)

    def _packed(self, name: str) -> GGUFBlocks | None:
        return self.checkpoint.packed(name, self.device, self.dtype)
