"""GGUFCheckpoint: the parts of a model out of a GGUF file, dense or in quantized blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.errors import UnsupportedModel
from quire.kernels.cpu.native import Native
from quire.kernels.cpu.tape import address
from quire.layers.source import Part, Shape
from quire.quant.ggml_types import PANEL_FORMATS, check_supported
from quire.quant.panels import ROWS_IN_PANEL
from quire.quant.tile_format import TILE_FORMATS, TILE_OUTPUTS
from quire.quant.weight import Weight
from quire.weights.checkpoint import Work, part_bytes
from quire.weights.experts import gguf_part
from quire.weights.gguf import GGUFFile, TensorInfo
from quire.weights.names import gguf_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from quire.quant.tile_format import TileFormat
    from quire.quant.tile_packing import TileRows

SLICE_BYTES = 1 << 20  # of the file, that one thread reads and unpacks at a time

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class GGUFPart:
    """Rows of a tensor in a GGUF file: dense, or in quantized blocks."""

    file: GGUFFile
    name: str
    part: Part
    cols: int | None
    order = None

    @property
    def tensors(self) -> dict[str, Shape]:
        """A matrix of one row is a vector in the file, as Qwen2-MoE's gate of the shared expert."""
        shape = self.part.stored_shape(self.cols)
        return {self.name: shape[1:] if len(shape) == 2 and shape[0] == 1 else shape}

    @property
    def info(self) -> TensorInfo:
        return self.file.tensors[self.name]

    @property
    def nbytes(self) -> int:
        return part_bytes(self.info.nbytes, self.part, self.cols)

    @property
    def quantized(self) -> bool:
        return self.info.type.quantized

    @property
    def panel_format(self) -> str:
        return PANEL_FORMATS.get(self.info.type, "f32")

    @property
    def tile_format(self) -> TileFormat | None:
        return TILE_FORMATS.get(self.info.type)

    def tile_rows(self, device: str) -> Iterator[tuple[int, Callable[[], TileRows]]]:
        for start, stop in self.slices(TILE_OUTPUTS):
            yield start, partial(self._tile_rows, device, start, stop)

    def _tile_rows(self, device: str, start: int, stop: int) -> TileRows:
        import torch

        from quire.quant.gguf_codes import tile_rows

        return tile_rows(self.info.type, torch.from_numpy(self.read_columns(start, stop)).to(device))

    def fill(self, out: Tensor) -> list[Work]:
        check_supported(self.info.type)
        if self.cols is None:
            return [partial(self._fill_vector, out)]
        return [partial(self._fill_rows, out, *rows) for rows in self.slices()]

    def _fill_vector(self, out: Tensor) -> None:
        """A vector is stored as one row."""
        import torch

        from quire.quant.gguf_blocks import GGUFBlocks

        data = torch.from_numpy(self._read_vector())
        values = GGUFBlocks(self.info.type, data, self.info.cols).dense()[0]
        out.copy_(torch.cat([values[run.start : run.stop : run.step] for run in self.part.stored_runs(0, len(out))]))

    def _fill_rows(self, out: Tensor, start: int, stop: int) -> None:
        import torch

        from quire.quant.gguf_blocks import GGUFBlocks

        data = torch.from_numpy(self._read(start, stop))
        blocks = GGUFBlocks(self.info.type, data.to(out.device), self.info.cols)
        if self.part.columns is None:
            blocks.dense_into(out[start:stop])
        else:
            out[start:stop] = blocks.dense()[:, self.part.columns.start : self.part.columns.stop]

    def unpack(self, native: Native) -> NDArray[np.float32]:
        check_supported(self.info.type)
        values = dequantize(native, self.info, self._read_vector(), self.info.cols)[0]
        runs = self.part.stored_runs(0, self.part.rows)
        return np.concatenate([values[run.start : run.stop : run.step] for run in runs])

    def pack(self, panels: Any, first: int, native: Native) -> list[Work]:
        check_supported(self.info.type)
        return [partial(self._pack, panels, first, native, *rows) for rows in self.slices(ROWS_IN_PANEL)]

    def _pack(self, panels: Any, first: int, native: Native, start: int, stop: int) -> None:
        info, target_rows = self.info, (first + start, stop - start)
        raw = self.read_columns(start, stop)
        if info.type.quantized and panels.format == PANEL_FORMATS.get(info.type):
            panels.pack_gguf(info.type.number, address(raw), *target_rows)
        elif info.type.quantized:
            values = dequantize(native, info, raw, panels.cols)  # must live while C++ reads it
            panels.pack_dense("f32", address(values), panels.cols, *target_rows)
        else:
            panels.pack_dense(PANEL_FORMATS[info.type], address(raw), panels.cols, *target_rows)

    def slices(self, unit: int = 1) -> list[tuple[int, int]]:
        """The part's rows as (start, stop) slices of about SLICE_BYTES; all but the last are multiples of `unit`."""
        rows = self.part.rows
        step = max(1, SLICE_BYTES * self.info.rows // self.info.nbytes // unit) * unit
        return [(start, min(start + step, rows)) for start in range(0, rows, step)]

    @property
    def row_bytes(self) -> slice:
        """The bytes of a stored row that hold the part's columns."""
        type, columns = self.info.type, self.part.columns or range(self.info.cols)
        if columns.start % type.block_size or columns.stop % type.block_size:
            raise UnsupportedModel(
                f"{self.name} is stored in {type.name} blocks of {type.block_size} columns, and cannot be split "
                f"at columns {columns.start} and {columns.stop}. Use fewer devices, or weights of another type."
            )
        return slice(type.row_bytes(columns.start), type.row_bytes(columns.stop))

    def read_columns(self, start: int, stop: int) -> Bytes:
        """The stored blocks of the part's rows `start` to `stop`, and of the part's columns only."""
        data = self._read(start, stop)
        return data if self.part.columns is None else np.ascontiguousarray(data[:, self.row_bytes])

    @property
    def expert(self) -> int:
        """The part's entry of the stored tensor's first axis, if that is one of experts."""
        return self.part.expert[0] if self.part.stacked and self.part.expert else 0

    def _read_vector(self) -> Bytes:
        return self.file.read(self.name, slice(self.expert, self.expert + 1))

    def _read(self, start: int, stop: int) -> Bytes:
        runs, base = self.part.stored_runs(start, stop), self.expert * self.part.stored_rows
        read = [self.file.read(self.name, slice(base + run[0], base + run[-1] + 1))[:: run.step] for run in runs]
        return read[0] if len(read) == 1 else np.concatenate(read)


def dequantize(native: Native, info: TensorInfo, data: Bytes, cols: int) -> NDArray[np.float32]:
    """Rows of blocks -> [rows, cols] float32."""
    assert data.flags.c_contiguous
    values = np.empty((len(data), cols), np.float32)
    native.module.dequantize(info.type.number, address(data), *values.shape, address(values))
    return values


class GGUFCheckpoint:
    """The tensors of a GGUF file. Converters store the parts of a fused matrix in order, and nothing transposed."""

    def __init__(self, file: GGUFFile, family: str) -> None:
        self.file = file
        self.family = family

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: info.shape for name, info in self.file.tensors.items()}

    def find(self, part: Part, cols: int | None) -> GGUFPart:
        part, cols = gguf_part(part.in_plain_order(), cols, self.file.tensors)
        return GGUFPart(self.file, gguf_name(part.name, self.family), part, cols)

    def may_stay_unread(self, name: str) -> bool:
        return False

    def weight(self, parts: Sequence[Part], cols: int, device: str, dtype: torch.dtype) -> Weight | None:
        import torch

        from quire.quant.gguf_blocks import GGUFBlocks

        found = [self.find(part, cols) for part in parts]
        type = found[0].info.type
        if not type.quantized or any(stored.info.type != type for stored in found):
            return None
        check_supported(type)
        num_rows, row_bytes = [part.rows for part in parts], found[0].row_bytes
        data = torch.empty(sum(num_rows), row_bytes.stop - row_bytes.start, dtype=torch.uint8, device=device)
        for stored, rows in zip(found, torch.split(data, num_rows), strict=True):
            for start, stop in stored.slices():
                rows[start:stop] = torch.from_numpy(stored.read_columns(start, stop))
        return GGUFBlocks(type, data, parts[0].width(cols), dtype)
