"""Checkpoints as a source of weights: what a model asks for by canonical name, out of GGUF or safetensors files.

A `Checkpoint` says what is in the files and fills tensors from them; `CheckpointSource` fuses, places and casts, and is
what a model is built from. Whether the files and the model fit is `survey.py`'s; who calls all this is `loader.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.quant.gguf_blocks import GGUFBlocks, check_supported
from quire.quant.weight import Dense, Stacked, Weight
from quire.weights.gguf import GGUFFile
from quire.weights.names import gguf_name, text_name
from quire.weights.safetensors import SafetensorsFiles

SLICE_BYTES = 1 << 20  # of a file, that a thread holds in memory while it unpacks them

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

        def unpack(rows: slice) -> None:
            data = self._read(info.name, rows)
            GGUFBlocks(info.type, data.to(out.device), info.cols).dense_into(out[rows])

        spread(unpack, self._slices(info.name))

    def packed(self, name: str, device: torch.device, dtype: torch.dtype) -> GGUFBlocks | None:
        info = self.file.tensors[self.own_name(name)]
        if not info.type.quantized:
            return None
        data = torch.empty(info.rows, info.type.row_bytes(info.cols), dtype=torch.uint8, device=device)
        blocks = GGUFBlocks(info.type, data, info.cols, dtype)

        def copy(rows: slice) -> None:
            data[rows] = self._read(info.name, rows)

        spread(copy, self._slices(info.name))
        return blocks

    def _slices(self, name: str) -> list[slice]:
        info = self.file.tensors[name]
        step = max(1, SLICE_BYTES * info.rows // info.nbytes)
        return [slice(start, min(start + step, info.rows)) for start in range(0, info.rows, step)]

    def _read(self, name: str, rows: slice) -> Tensor:
        """A copy of some rows' bytes; their pages in the map are given back."""
        data = torch.from_numpy(np.array(self.file.raw(name)[rows]))
        self.file.release(name, rows.start, rows.stop)
        return data


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
        self.nbytes = 0  # of the weights handed out, as they lie in memory

    def matrix(self, parts: Parts, cols: int) -> Weight:
        weight = stack([self._stored(name, rows, cols) for name, rows in parts]) if self.keep_packed else None
        weight = weight or self._dense(parts, cols)
        self.nbytes += weight.nbytes
        return weight

    def vector(self, parts: Parts) -> Tensor:
        out = torch.empty(sum(size for _, size in parts), dtype=self.dtype, device=self.device)
        for (name, _), part in zip(parts, torch.split(out, [size for _, size in parts]), strict=True):
            self._fill(name, part.unsqueeze(0))
        self.nbytes += out.nbytes
        return out

    def _dense(self, parts: Parts, cols: int) -> Dense:
        """Each tensor is written right into its rows of the fused one, so nothing is held twice."""
        out = torch.empty(sum(rows for _, rows in parts), cols, dtype=self.dtype, device=self.device)
        for (name, _), part in zip(parts, torch.split(out, [rows for _, rows in parts]), strict=True):
            self._fill(name, part)
        return Dense(out)

    def _stored(self, name: str, rows: int, cols: int) -> Weight:
        blocks = self.checkpoint.packed(name, self.device, self.dtype)
        if blocks is None:
            return self._dense([(name, rows)], cols)
        self._report(name)
        return blocks

    def _fill(self, name: str, out: Tensor) -> None:
        self.checkpoint.fill(name, out)
        self._report(name)

    def _report(self, name: str) -> None:
        if self.on_read is not None:
            self.on_read(self.checkpoint.nbytes(name))


def spread(work: Callable[[slice], None], slices: Sequence[slice]) -> None:
    """Do the work for every slice, on as many threads as torch has, with torch itself on one in each.

    Splitting every small op over torch's own threads instead would have them wait for each other a thousand times over,
    which takes many times as long whenever another program keeps a core busy.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if len(slices) == 1 or threads == 1:
            for part in slices:
                work(part)
            return
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, slices))
    finally:
        torch.set_num_threads(threads)


def stack(weights: Sequence[Weight]) -> Weight:
    """One weight out of several, one below the other: in one piece if they are blocks of one type."""
    first = weights[0]
    if len(weights) == 1:
        return first
    blocks = [weight for weight in weights if isinstance(weight, GGUFBlocks)]
    if len(blocks) == len(weights) and len({weight.type for weight in blocks}) == 1:
        return GGUFBlocks(
            blocks[0].type, torch.cat([weight.data for weight in blocks]), blocks[0].cols, blocks[0].dtype
        )
    return Stacked(weights)
