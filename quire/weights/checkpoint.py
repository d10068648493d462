"""Checkpoints as a source of weights: the interface of a file format, and the `Source` that a model is built from.

A `Checkpoint` (`gguf_checkpoint.py`, `safetensors_checkpoint.py`) finds the `StoredPart` of each part that a model
declares. A `CheckpointSource` makes weights of them: `panel_source.py` for quire's CPU kernels, `dense_source.py` for
torch. `survey.py` checks beforehand that files and model match. `loader.py` calls all of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from quire.kernels.cpu.native import Native
from quire.layers.source import Part, Shape
from quire.quant.weight import Weight

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from quire.quant.tile_format import TileFormat
    from quire.quant.tile_packing import TileRows

Work = Callable[[], None]


class StoredPart(Protocol):
    """A part as files store it. A quantization scheme is a class with these methods, and a `Weight`.

    `tensors` does not depend on the files. The other members are valid only if the files have these tensors.
    """

    @property
    def part(self) -> Part: ...

    @property
    def cols(self) -> int | None:
        """Columns of the whole matrix; None for a vector."""
        ...

    @property
    def tensors(self) -> dict[str, Shape]:
        """The tensors that hold the part, by their names in the files, with the shape that each must have."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the part in the files."""
        ...

    @property
    def quantized(self) -> bool: ...

    @property
    def panel_format(self) -> str:
        """The panel format that holds the part without loss."""
        ...

    @property
    def tile_format(self) -> TileFormat | None:
        """The tiles of quire's GPU kernels that hold the part without loss. None: there are none."""
        ...

    def tile_rows(self, device: str) -> Iterator[tuple[int, Callable[[], TileRows]]]:
        """The rows as codes, on the device: slices by their first row, a multiple of 64, and what reads each."""
        ...

    @property
    def order(self) -> NDArray[np.int64] | None:
        """Column i of the panels belongs to input order[i]. None: in order."""
        ...

    def fill(self, out: Tensor) -> list[Work]:
        """Tasks that write the part, dense, into `out` [rows, cols] or [rows], on its device."""
        ...

    def pack(self, panels: Any, first: int, native: Native) -> list[Work]:
        """Tasks that write the part into panels, from row `first` on."""
        ...

    def unpack(self, native: Native) -> NDArray[np.float32]:
        """The values of a vector."""
        ...


class Checkpoint(Protocol):
    """Tensors in files."""

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shape of every tensor, by its name in the files."""
        ...

    def find(self, part: Part, cols: int | None) -> StoredPart:
        """How the files store a part of a matrix with `cols` columns, or of a vector if `cols` is None."""
        ...

    def may_stay_unread(self, name: str) -> bool:
        """Whether the files may have this tensor although the model does not use it."""
        ...

    def weight(self, parts: Sequence[Part], cols: int, device: str, dtype: torch.dtype) -> Weight | None:
        """One Weight of the parts as they are stored, or None if they are dense or of different types."""
        ...


def part_bytes(tensor_bytes: int, part: Part, cols: int | None) -> int:
    """Bytes of a part, from the bytes of the tensor that stores it."""
    num_experts = part.expert[1] if part.stacked and part.expert else 1
    return tensor_bytes * part.rows * part.width(cols or 1) // (num_experts * part.stored_rows * (cols or 1))


class CheckpointSource:
    """A `Source` over a checkpoint that passed `survey.check`.

    `matrix` may return before the matrix is filled: a thread pool fills it while the model is built. The end of the
    `with` block waits for the pool, and calls `on_read` with the bytes of each part.
    """

    def __init__(self, checkpoint: Checkpoint, threads: int, on_read: Callable[[int], None] | None) -> None:
        self.checkpoint = checkpoint
        self.nbytes = 0  # of all weights returned so far, in memory
        self.used: set[str] = set()  # names, in the files, of the tensors read
        self._threads = threads
        self._on_read = on_read
        self._pending: list[tuple[StoredPart, list[Future[None]]]] = []

    def __enter__(self) -> Self:
        self._pool = ThreadPoolExecutor(self._threads)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            for stored, futures in self._pending if error is None else ():
                for future in futures:
                    future.result()
                self._report(stored)
        finally:
            self._pool.shutdown(cancel_futures=True)

    def _find(self, part: Part, cols: int | None) -> StoredPart:
        stored = self.checkpoint.find(part, cols)
        self.used.update(stored.tensors)
        return stored

    def _submit(self, stored: StoredPart, tasks: Sequence[Work]) -> None:
        self._pending.append((stored, [self._pool.submit(task) for task in tasks]))

    def _report(self, stored: StoredPart) -> None:
        if self._on_read is not None:
            self._on_read(stored.nbytes)
