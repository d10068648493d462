"""Checkpoints as a source of weights: the parts that a model declares, out of GGUF or safetensors files.

A `Checkpoint` finds the `StoredPart` that holds a part's numbers, and how; `CheckpointSource` fuses, places and casts,
and is what a model is built from. Whether files and model fit is checked by `survey.py`; `loader.py` calls all this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from quire.errors import UnsupportedModel
from quire.kernels.cpu.native import Native
from quire.layers.source import Part, Shape
from quire.quant.ggml_types import PANEL_FORMATS
from quire.quant.gguf_blocks import GGUFBlocks, check_supported
from quire.quant.panels import ROWS_IN_PANEL, PanelWeight, join, rounded_format
from quire.quant.weight import Dense, Stacked, Weight
from quire.weights.gguf import GGUFFile, TensorInfo
from quire.weights.names import gguf_name, text_name
from quire.weights.safetensors import SafetensorsFiles

SLICE_BYTES = 1 << 20  # of a file, that a thread holds in memory while it unpacks them
SENT_BYTES = 1 << 24  # of a plain tensor, that a thread sends to a device at a time

Work = Callable[[], None]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class StoredPart(Protocol):
    """A part as files store it. A quantization scheme is a class with these methods, and a `Weight`.

    `tensors` is what the files must have, known without them. The rest holds once they are found to have it.
    """

    @property
    def part(self) -> Part: ...

    @property
    def cols(self) -> int | None:
        """Of the whole matrix; None for a vector."""
        ...

    @property
    def tensors(self) -> dict[str, Shape]:
        """The tensors that hold the part, by the names that the files use, and the shape that each must have."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the files that are the part's."""
        ...

    @property
    def quantized(self) -> bool: ...

    @property
    def panel_format(self) -> str:
        """The format of panels that holds the part without loss."""
        ...

    def fill(self, out: Tensor) -> list[Work]:
        """What is to be done to write the part, dense, into `out` [rows, cols] or [rows], on its device."""
        ...

    def pack(self, panels: Any, first: int) -> list[Work]:
        """What is to be done to write the part into rows `first` on of panels."""
        ...


class Checkpoint(Protocol):
    """Tensors in files."""

    @property
    def shapes(self) -> dict[str, Shape]:
        """Every tensor there is, under the names that the files use."""
        ...

    def find(self, part: Part, cols: int | None) -> StoredPart:
        """How the files store a part of a matrix with `cols` columns or, with None, of a vector."""
        ...

    def weight(self, parts: Sequence[Part], cols: int, device: torch.device, dtype: torch.dtype) -> Weight | None:
        """One Weight of the parts as they are stored, or None if they are dense or cannot be in one piece."""
        ...


@dataclass(frozen=True, slots=True)
class GGUFPart:
    """Rows of a tensor in a GGUF file: dense, or in quantized blocks."""

    file: GGUFFile
    name: str
    part: Part
    cols: int | None

    @property
    def tensors(self) -> dict[str, Shape]:
        return {self.name: self.part.stored_shape(self.cols)}

    @property
    def info(self) -> TensorInfo:
        return self.file.tensors[self.name]

    @property
    def nbytes(self) -> int:
        return share_of(self.info.nbytes, self.part, self.cols)

    @property
    def quantized(self) -> bool:
        return self.info.type.quantized

    @property
    def panel_format(self) -> str:
        return PANEL_FORMATS.get(self.info.type, "f32")

    def fill(self, out: Tensor) -> list[Work]:
        check_supported(self.info.type)
        if self.cols is None:
            return [partial(self._fill_vector, out)]
        return [partial(self._unpack, out, *rows) for rows in self.slices()]

    def _fill_vector(self, out: Tensor) -> None:
        """A vector is one row of the file."""
        data = torch.from_numpy(self.file.read(self.name, slice(0, 1)))
        values = GGUFBlocks(self.info.type, data, self.info.cols).dense()[0]
        out.copy_(torch.cat([values[run.start : run.stop : run.step] for run in self.part.stored_runs(0, len(out))]))

    def _unpack(self, out: Tensor, start: int, stop: int) -> None:
        data = torch.from_numpy(self._read(start, stop))
        blocks = GGUFBlocks(self.info.type, data.to(out.device), self.info.cols)
        if self.part.columns is None:
            blocks.dense_into(out[start:stop])
        else:
            out[start:stop] = blocks.dense()[:, self.part.columns.start : self.part.columns.stop]

    def pack(self, panels: Any, first: int) -> list[Work]:
        check_supported(self.info.type)
        return [partial(self._pack, panels, first, *rows) for rows in self.slices(ROWS_IN_PANEL)]

    def _pack(self, panels: Any, first: int, start: int, stop: int) -> None:
        info, place = self.info, (first + start, stop - start)
        raw = self.read_columns(start, stop)
        if info.type.quantized and panels.format == PANEL_FORMATS.get(info.type):
            panels.pack_gguf(info.type.number, raw.ctypes.data, *place)
        elif info.type.quantized:
            values = GGUFBlocks(info.type, torch.from_numpy(raw), panels.cols).dense()
            panels.pack_dense("f32", values.data_ptr(), panels.cols, *place)
        else:
            panels.pack_dense(PANEL_FORMATS[info.type], raw.ctypes.data, panels.cols, *place)

    def slices(self, unit: int = 1) -> list[tuple[int, int]]:
        """The part's rows in slices of about SLICE_BYTES, (start, stop), a multiple of `unit` but for the last."""
        rows = self.part.rows
        step = max(1, SLICE_BYTES * self.info.rows // self.info.nbytes // unit) * unit
        return [(start, min(start + step, rows)) for start in range(0, rows, step)]

    @property
    def row_bytes(self) -> slice:
        """Which bytes of a stored row hold the part's columns."""
        type, columns = self.info.type, self.part.columns or range(self.info.cols)
        if columns.start % type.block_size or columns.stop % type.block_size:
            raise UnsupportedModel(
                f"{self.name} is stored in {type.name} blocks of {type.block_size} columns, and cannot be cut at "
                f"columns {columns.start} and {columns.stop}. Use fewer devices, or weights of another type."
            )
        return slice(type.row_bytes(columns.start), type.row_bytes(columns.stop))

    def read_columns(self, start: int, stop: int) -> Bytes:
        """Blocks of some of the part's rows, and of its columns only."""
        data = self._read(start, stop)
        return data if self.part.columns is None else np.ascontiguousarray(data[:, self.row_bytes])

    def _read(self, start: int, stop: int) -> Bytes:
        runs = self.part.stored_runs(start, stop)
        read = [self.file.read(self.name, slice(run[0], run[-1] + 1))[:: run.step] for run in runs]
        return read[0] if len(read) == 1 else np.concatenate(read)


class GGUFCheckpoint:
    """The tensors of a GGUF file. Converters write parts one below the other, and nothing transposed."""

    def __init__(self, file: GGUFFile, family: str) -> None:
        self.file = file
        self.family = family

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: info.shape for name, info in self.file.tensors.items()}

    def find(self, part: Part, cols: int | None) -> GGUFPart:
        return GGUFPart(self.file, gguf_name(part.name, self.family), part.in_plain_order(), cols)

    def weight(self, parts: Sequence[Part], cols: int, device: torch.device, dtype: torch.dtype) -> Weight | None:
        found = [self.find(part, cols) for part in parts]
        type = found[0].info.type
        if not type.quantized or any(stored.info.type != type for stored in found):
            return None
        check_supported(type)
        rows, kept = [part.rows for part in parts], found[0].row_bytes
        data = torch.empty(sum(rows), kept.stop - kept.start, dtype=torch.uint8, device=device)
        for stored, own in zip(found, torch.split(data, rows), strict=True):
            for start, stop in stored.slices():
                own[start:stop] = torch.from_numpy(stored.read_columns(start, stop))
        return GGUFBlocks(type, data, parts[0].width(cols), dtype)


@dataclass(frozen=True, slots=True)
class DensePart:
    """Rows of a plain tensor in safetensors files."""

    files: SafetensorsFiles
    name: str
    part: Part
    cols: int | None
    quantized = False

    @property
    def tensors(self) -> dict[str, Shape]:
        return {self.name: self.part.stored_shape(self.cols)}

    @property
    def nbytes(self) -> int:
        return share_of(self.files.tensors[self.name].nbytes, self.part, self.cols)

    @property
    def panel_format(self) -> str:
        return {"F16": "f16", "BF16": "bf16"}.get(self.files.tensors[self.name].dtype, "f32")

    def fill(self, out: Tensor) -> list[Work]:
        def copy() -> None:
            """In pieces, cast on the device: torch would cast all of it on the host, in a copy of its own."""
            first = 0
            for run in self._runs():
                num_rows = max(1, SENT_BYTES * len(run) // max(1, run.nbytes))
                for piece in torch.split(run, num_rows):
                    target = out[first : first + len(piece)]
                    target.copy_(piece if piece.dtype == out.dtype else piece.to(out.device))
                    first += len(piece)

        return [copy]

    def pack(self, panels: Any, first: int) -> list[Work]:
        def pack_all() -> None:
            runs = self._runs()
            values = (runs[0] if len(runs) == 1 else torch.cat(runs)).contiguous()
            values = values.float() if values.dtype == torch.float64 else values
            kind = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}[values.dtype]
            panels.pack_dense(kind, values.data_ptr(), values.shape[1], first, len(values))

        return [pack_all]

    def _runs(self) -> list[Tensor]:
        """The part's rows, as views of the mapped file."""
        stored = self.files.read_floats(self.name)
        if self.part.transposed and self.cols is not None:
            stored = stored.T
        if self.part.columns is not None:
            stored = stored[:, self.part.columns.start : self.part.columns.stop]
        return [stored[run.start : run.stop : run.step] for run in self.part.stored_runs(0, self.part.rows)]


class SafetensorsCheckpoint:
    """The tensors of a Hugging Face directory."""

    def __init__(self, files: SafetensorsFiles) -> None:
        self.files = files
        self._own = {text_name(name): name for name in files.tensors}

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: stored.shape for name, stored in self.files.tensors.items()}

    def find(self, part: Part, cols: int | None) -> StoredPart:
        return DensePart(self.files, self._own.get(part.name, part.name), part, cols)

    def weight(self, parts: Sequence[Part], cols: int, device: torch.device, dtype: torch.dtype) -> Weight | None:
        return None


def share_of(nbytes: int, part: Part, cols: int | None) -> int:
    """A part's share of the bytes of the tensor that it is stored in."""
    return nbytes * part.rows * part.width(cols or 1) // (part.stored_rows * (cols or 1))


class CheckpointSource:
    """A `Source` over a checkpoint that has been found to fit (`survey.check`).

    With `packed`, tensors stored in quantized blocks stay in them; all others, and all of them without it, become dense
    in `dtype`. With `native` matrices are packed into panels for our own kernels, as they are stored or, if they are
    plain and `quantize` says "int8" or "int4", rounded to that. A dense or packed matrix is handed out before it is
    filled: threads do that while the model is being built, and the source, a context manager, ends when all are.
    `on_read` is then told the bytes of each.

    Torch itself stays on one thread meanwhile. Splitting each of thousands of small ops over its own threads would have
    them wait for each other all the time, many times as long whenever another program keeps a core busy.
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
        self.nbytes = 0  # of the weights handed out, as they lie in memory
        self.used: set[str] = set()  # the files' own names of the tensors that were asked for
        self._filling: list[tuple[StoredPart, list[Future[None]]]] = []

    def __enter__(self) -> CheckpointSource:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._pool = ThreadPoolExecutor(self.native.threads if self.native else self._threads)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            for stored, slices in self._filling if error is None else ():
                for each in slices:
                    each.result()
                self._report(stored)
        finally:
            self._pool.shutdown(cancel_futures=True)
            torch.set_num_threads(self._threads)

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
        """Filled at once: layers may compute with it while they are built."""
        out = torch.empty(sum(part.rows for part in parts), dtype=self.dtype, device=self.device)
        for part, own in zip(parts, torch.split(out, [part.rows for part in parts]), strict=True):
            stored = self._find(part, None)
            for work in stored.fill(own):
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
        panels = [native.module.Panels(kind, sum(parts[i].rows for i in own), width) for kind, own in joined]
        for (_, own), target in zip(joined, panels, strict=True):
            first = 0
            for i in own:
                self._submit(found[i], found[i].pack(target, first))
                first += parts[i].rows
        return PanelWeight(panels, native)

    def _dense(self, parts: Sequence[Part], cols: int) -> Dense:
        """Each part is written right into its rows of the fused matrix, so nothing is held twice."""
        rows = [part.rows for part in parts]
        out = torch.empty(sum(rows), parts[0].width(cols), dtype=self.dtype, device=self.device)
        for part, own in zip(parts, torch.split(out, rows), strict=True):
            stored = self._find(part, cols)
            self._submit(stored, stored.fill(own))
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

    def _submit(self, stored: StoredPart, works: Sequence[Work]) -> None:
        self._filling.append((stored, [self._pool.submit(work) for work in works]))

    def _report(self, stored: StoredPart) -> None:
        if self.on_read is not None:
            self.on_read(stored.nbytes)
