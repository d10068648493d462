"""Checkpoints as a source of weights: what a model asks for by canonical name, out of GGUF or safetensors files.

A `Checkpoint` says what is in the files and fills tensors from them; `CheckpointSource` fuses, places and casts, and is
what a model is built from. Whether the files and the model fit is `survey.py`'s; who calls all this is `loader.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels.cpu.native import Native
from quire.quant.ggml_types import PANEL_FORMATS
from quire.quant.gguf_blocks import GGUFBlocks, check_supported
from quire.quant.panels import ROWS_IN_PANEL, PanelWeight, join, rounded_format
from quire.quant.weight import Dense, Stacked, Weight
from quire.weights.gguf import GGUFFile
from quire.weights.names import gguf_name, text_name
from quire.weights.safetensors import SafetensorsFiles

SLICE_BYTES = 1 << 20  # of a file, that a thread holds in memory while it unpacks them
SENT_BYTES = 1 << 24  # of a plain tensor, that a thread sends to a device at a time

Parts = Sequence[tuple[str, int]]
Work = Callable[[], None]


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

    def fill(self, name: str, out: Tensor) -> list[Work]:
        """What is to be done to write the tensor, dense, into `out` [rows, cols], in out's dtype and on its device."""
        ...

    def packed(self, name: str, device: torch.device, dtype: torch.dtype) -> GGUFBlocks | None:
        """The tensor in the blocks that it is stored in, or None if it is stored plainly."""
        ...

    def panel_format(self, name: str) -> str:
        """The format of panels that holds the tensor without loss."""
        ...

    def pack(self, name: str, panels: Any, first: int) -> list[Work]:
        """What is to be done to write the tensor into rows `first` on of panels."""
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

    def fill(self, name: str, out: Tensor) -> list[Work]:
        info = self.file.tensors[self.own_name(name)]
        check_supported(info.type)

        def unpack(rows: slice) -> None:
            data = self._read(info.name, rows)
            GGUFBlocks(info.type, data.to(out.device), info.cols).dense_into(out[rows])

        return [partial(unpack, rows) for rows in self._slices(info.name)]

    def packed(self, name: str, device: torch.device, dtype: torch.dtype) -> GGUFBlocks | None:
        info = self.file.tensors[self.own_name(name)]
        if not info.type.quantized:
            return None
        data = torch.empty(info.rows, info.type.row_bytes(info.cols), dtype=torch.uint8, device=device)
        for rows in self._slices(info.name):
            data[rows] = self._read(info.name, rows)
        return GGUFBlocks(info.type, data, info.cols, dtype)

    def panel_format(self, name: str) -> str:
        return PANEL_FORMATS.get(self.file.tensors[self.own_name(name)].type, "f32")

    def pack(self, name: str, panels: Any, first: int) -> list[Work]:
        info = self.file.tensors[self.own_name(name)]
        check_supported(info.type)

        def pack_rows(rows: slice) -> None:
            place = (first + rows.start, rows.stop - rows.start)
            if info.type.quantized and panels.format == PANEL_FORMATS.get(info.type):
                raw = self.file.read(info.name, rows)
                panels.pack_gguf(info.type.number, raw.ctypes.data, *place)
            elif info.type.quantized:
                values = GGUFBlocks(info.type, self._read(info.name, rows), info.cols).dense()
                panels.pack_dense("f32", values.data_ptr(), info.cols, *place)
            else:
                raw = self.file.read(info.name, rows)
                panels.pack_dense(PANEL_FORMATS[info.type], raw.ctypes.data, info.cols, *place)

        return [partial(pack_rows, rows) for rows in self._slices(info.name, ROWS_IN_PANEL)]

    def _slices(self, name: str, unit: int = 1) -> list[slice]:
        """Rows of about SLICE_BYTES each, a multiple of `unit` but for the last."""
        info = self.file.tensors[name]
        step = max(1, SLICE_BYTES * info.rows // info.nbytes // unit) * unit
        return [slice(start, min(start + step, info.rows)) for start in range(0, info.rows, step)]

    def _read(self, name: str, rows: slice) -> Tensor:
        return torch.from_numpy(self.file.read(name, rows))


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

    def fill(self, name: str, out: Tensor) -> list[Work]:
        def copy() -> None:
            """In pieces, cast on the device: torch would cast all of it on the host, in a copy of its own."""
            stored = self.files.read(self.own_name(name)).view(out.shape)
            num_rows = max(1, SENT_BYTES * len(stored) // max(1, stored.nbytes))
            for target, part in zip(torch.split(out, num_rows), torch.split(stored, num_rows), strict=True):
                target.copy_(part if part.dtype == out.dtype else part.to(out.device))

        return [copy]

    def packed(self, name: str, device: torch.device, dtype: torch.dtype) -> GGUFBlocks | None:
        return None

    def panel_format(self, name: str) -> str:
        return {"F16": "f16", "BF16": "bf16"}.get(self.files.tensors[self.own_name(name)].dtype, "f32")

    def pack(self, name: str, panels: Any, first: int) -> list[Work]:
        def pack_all() -> None:
            values = self.files.read(self.own_name(name)).contiguous()
            values = values.float() if values.dtype == torch.float64 else values
            kind = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}[values.dtype]
            panels.pack_dense(kind, values.data_ptr(), values.shape[1], first, len(values))

        return [pack_all]


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
        self._filling: list[tuple[str, list[Future[None]]]] = []

    def __enter__(self) -> CheckpointSource:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._pool = ThreadPoolExecutor(self.native.threads if self.native else self._threads)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            for name, parts in self._filling if error is None else ():
                for part in parts:
                    part.result()
                self._report(name)
        finally:
            self._pool.shutdown(cancel_futures=True)
            torch.set_num_threads(self._threads)

    def matrix(self, parts: Parts, cols: int) -> Weight:
        weight: Weight
        if self.native is not None:
            weight = self._panels(self.native, parts, cols)
        elif self.keep_packed:
            weight = stack([self._stored(name, rows, cols) for name, rows in parts])
        else:
            weight = self._dense(parts, cols)
        self.nbytes += weight.nbytes
        return weight

    def vector(self, parts: Parts) -> Tensor:
        """Filled at once: layers may compute with it while they are built."""
        out = torch.empty(sum(size for _, size in parts), dtype=self.dtype, device=self.device)
        for (name, _), part in zip(parts, torch.split(out, [size for _, size in parts]), strict=True):
            for work in self.checkpoint.fill(name, part.unsqueeze(0)):
                work()
            self._report(name)
        self.nbytes += out.nbytes
        return out

    def _panels(self, native: Native, parts: Parts, cols: int) -> PanelWeight:
        joined = join(
            parts, [rounded_format(self.checkpoint.panel_format(name), name, cols, self.quantize) for name, _ in parts]
        )
        weight = PanelWeight([native.module.Panels(kind, count_rows(own), cols) for kind, own in joined], native)
        for (_, own), panels in zip(joined, weight.parts, strict=True):
            first = 0
            for name, rows in own:
                self._filling.append((name, [self._pool.submit(w) for w in self.checkpoint.pack(name, panels, first)]))
                first += rows
        return weight

    def _dense(self, parts: Parts, cols: int) -> Dense:
        """Each tensor is written right into its rows of the fused one, so nothing is held twice."""
        out = torch.empty(sum(rows for _, rows in parts), cols, dtype=self.dtype, device=self.device)
        for (name, _), part in zip(parts, torch.split(out, [rows for _, rows in parts]), strict=True):
            self._filling.append((name, [self._pool.submit(work) for work in self.checkpoint.fill(name, part)]))
        return Dense(out, self._linear)

    def _stored(self, name: str, rows: int, cols: int) -> Weight:
        blocks = self.checkpoint.packed(name, self.device, self.dtype)
        if blocks is None:
            return self._dense([(name, rows)], cols)
        self._report(name)
        return blocks

    def _report(self, name: str) -> None:
        if self.on_read is not None:
            self.on_read(self.checkpoint.nbytes(name))


def count_rows(parts: Parts) -> int:
    return sum(rows for _, rows in parts)


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
