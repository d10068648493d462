"""Checkpoints as a source of weights: the interface of a file format, and the `Source` that a model is built from.

A `Checkpoint` (`gguf_checkpoint.py`, `safetensors_checkpoint.py`) finds the `StoredPart` of each part that a model
declares. `CheckpointSource` fuses parts, casts them and copies them to the device. `survey.py` checks beforehand that
files and model match. `loader.py` calls all of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels.cpu.native import Native
from quire.layers.source import Part, Shape
from quire.quant.panels import PanelWeight, join, rounded_format
from quire.quant.weight import Dense, Stacked, Weight

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

    def fill(self, out: Tensor) -> list[Work]:
        """Tasks that write the part, dense, into `out` [rows, cols] or [rows], on its device."""
        ...

    def pack(self, panels: Any, first: int) -> list[Work]:
        """Tasks that write the part into panels, from row `first` on."""
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

    def weight(self, parts: Sequence[Part], cols: int, device: torch.device, dtype: torch.dtype) -> Weight | None:
        """One Weight of the parts as they are stored, or None if they are dense or of different types."""
        ...


def part_bytes(tensor_bytes: int, part: Part, cols: int | None) -> int:
    """Bytes of a part, from the bytes of the tensor that stores it."""
    return tensor_bytes * part.rows * part.width(cols or 1) // (part.stored_rows * (cols or 1))


class CheckpointSource:
    """A `Source` over a checkpoint that passed `survey.check`.

    With `native`, matrices are packed into panels for quire's own kernels, in their stored format. Plain matrices are
    quantized first if `quantize` is "int8" or "int4". Without `native`, matrices become dense in `dtype`. With
    `packed`, matrices stored in quantized blocks keep their blocks.

    `matrix` returns before dense matrices and panels are filled: a thread pool fills them while the model is built. The
    end of the `with` block waits for the pool, and calls `on_read` with the bytes of each part.

    Torch runs on one thread meanwhile: splitting thousands of small ops over torch's threads costs more in
    synchronization than it saves, most of all on a busy machine.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        *,
        packed: bool = False,
        native: Native | None = None,
        linear: Callable[[Tensor, Tensor], Tensor] = functional.linear,
        quantize: str | None = None,
        on_read: Callable[[int], None] | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device
        self.keep_packed = packed
        self.native = native
        self._linear = linear
        self.quantize = quantize
        self.on_read = on_read
        self.nbytes = 0  # of all weights returned so far, in memory
        self.used: set[str] = set()  # names, in the files, of the tensors read
        self._pending: list[tuple[StoredPart, list[Future[None]]]] = []

    def __enter__(self) -> CheckpointSource:
        self._num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._pool = ThreadPoolExecutor(self.native.threads if self.native else self._num_threads)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            for stored, futures in self._pending if error is None else ():
                for future in futures:
                    future.result()
                self._report(stored)
        finally:
            self._pool.shutdown(cancel_futures=True)
            torch.set_num_threads(self._num_threads)

    def matrix(self, parts: Sequence[Part], cols: int) -> Weight:
        weight: Weight
        if self.native is not None:
            weight = self._panels(self.native, parts, cols)
        elif self.keep_packed:
            weight = self._as_stored(parts, cols)
        else:
            weight = self._dense(parts, cols)
        self.nbytes += weight.nbytes
        return weight

    def vector(self, parts: Sequence[Part]) -> Tensor:
        """Filled before it is returned: layers may compute with it while they are built."""
        out = torch.empty(sum(part.rows for part in parts), dtype=self.dtype, device=self.device)
        for part, rows in zip(parts, torch.split(out, [part.rows for part in parts]), strict=True):
            stored = self._find(part, None)
            for work in stored.fill(rows):
                work()
            self._report(stored)
        self.nbytes += out.nbytes
        return out

    def _panels(self, native: Native, parts: Sequence[Part], cols: int) -> PanelWeight:
        found, width = [self._find(part, cols) for part in parts], parts[0].width(cols)
        formats = [
            rounded_format(stored.panel_format, part.name, width, self.quantize)
            for part, stored in zip(parts, found, strict=True)
        ]
        joined = join([part.rows for part in parts], formats)
        panels = [native.module.Panels(kind, sum(parts[i].rows for i in indices), width) for kind, indices in joined]
        for (_, indices), target in zip(joined, panels, strict=True):
            first = 0
            for i in indices:
                self._submit(found[i], found[i].pack(target, first))
                first += parts[i].rows
        return PanelWeight(panels, native)

    def _dense(self, parts: Sequence[Part], cols: int) -> Dense:
        """Each part is written directly into its rows of the fused matrix, so no weight is in memory twice."""
        num_rows = [part.rows for part in parts]
        out = torch.empty(sum(num_rows), parts[0].width(cols), dtype=self.dtype, device=self.device)
        for part, rows in zip(parts, torch.split(out, num_rows), strict=True):
            stored = self._find(part, cols)
            self._submit(stored, stored.fill(rows))
        return Dense(out, self._linear)

    def _as_stored(self, parts: Sequence[Part], cols: int) -> Weight:
        found = [self._find(part, cols) for part in parts]
        if not any(stored.quantized for stored in found):
            return self._dense(parts, cols)
        weight = self.checkpoint.weight(parts, cols, self.device, self.dtype)
        if weight is None:
            return Stacked([self._as_stored([part], cols) for part in parts])
        for stored in found:
            self._report(stored)
        return weight

    def _find(self, part: Part, cols: int | None) -> StoredPart:
        stored = self.checkpoint.find(part, cols)
        self.used.update(stored.tensors)
        return stored

    def _submit(self, stored: StoredPart, tasks: Sequence[Work]) -> None:
        self._pending.append((stored, [self._pool.submit(task) for task in tasks]))

    def _report(self, stored: StoredPart) -> None:
        if self.on_read is not None:
            self.on_read(stored.nbytes)
