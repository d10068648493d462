"""CodePart: a part of a matrix that a quantization scheme stores as codes with scales.

A scheme (`weights/schemes/`) says how its files store a matrix: a `CodeMatrix`. The rest is the same for every scheme:
dense values or codes for torch, panels for the C++ kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.kernels.cpu.native import Native
from quire.kernels.cpu.tape import address
from quire.layers.source import Part, Shape
from quire.quant.code_format import E2M1, CodeFormat, CodeRows, dequantize, pack_codes, panel_format
from quire.quant.panels import ROWS_IN_PANEL
from quire.quant.tile_format import TILE_OUTPUTS, tile_format
from quire.weights.checkpoint import StoredPart, Work, part_bytes
from quire.weights.schemes.scheme import CodeMatrix, Module, Rows

if TYPE_CHECKING:
    from torch import Tensor

    from quire.quant.mxfp4_codes import Mxfp4Codes
    from quire.quant.tile_format import TileFormat
    from quire.quant.tile_packing import TileRows

MXFP4_GROUP = 32
SCALE_BIAS, MAX_SCALE = 127, 128  # exponents of `quant/mxfp4_codes.py`
SLICE_VALUES = 1 << 20  # codes that one thread reads at a time


@dataclass(frozen=True, slots=True)
class CodePart:
    """Rows of a matrix as codes. It is a `StoredPart`."""

    module: Module
    matrix: CodeMatrix
    part: Part
    quantized = True

    @classmethod
    def of(cls, module: Module, matrix: CodeMatrix, part: Part) -> CodePart:
        if part.columns is not None and (matrix.order is not None or not whole_groups(part.columns, matrix.format)):
            raise module.unsupported(
                f"columns {part.columns.start} to {part.columns.stop} cannot be split off a matrix in groups of "
                f"{matrix.format.group}{' that are not in order' if matrix.order is not None else ''}"
            )
        return cls(module, matrix, part)

    @property
    def cols(self) -> int:
        return self.module.cols

    @property
    def tensors(self) -> dict[str, Shape]:
        return self.matrix.tensors

    @property
    def format(self) -> CodeFormat:
        return self.matrix.format

    @property
    def order(self) -> NDArray[np.int64] | None:
        """Column i of the panels belongs to input order[i]. None: in order."""
        return self.matrix.order

    @property
    def nbytes(self) -> int:
        stored = sum(self.module.files.tensors[name].nbytes for name in self.tensors)
        return part_bytes(stored, self.part, self.cols)

    @property
    def width(self) -> int:
        return self.part.width(self.cols)

    @property
    def panel_format(self) -> str:
        return panel_format(self.format, self.width)

    @property
    def tile_format(self) -> TileFormat | None:
        return tile_format(self.format, self.width)

    def tile_rows(self, device: str) -> Iterator[tuple[int, Callable[[], TileRows]]]:
        for start, stop in self.slices(TILE_OUTPUTS):
            yield start, partial(self._tile_rows, device, start, stop)

    def _tile_rows(self, device: str, start: int, stop: int) -> TileRows:
        import torch

        from quire.quant.tile_packing import TileRows

        rows = self.codes(start, stop)
        zeros = None if rows.zeros is None else torch.from_numpy(rows.zeros).to(device)
        codes = torch.from_numpy(np.ascontiguousarray(rows.codes)).to(device)
        return TileRows(codes, torch.from_numpy(rows.scales).to(device), zeros)

    def slices(self, unit: int = ROWS_IN_PANEL) -> list[tuple[int, int]]:
        """The rows as (start, stop) slices. All but the last are multiples of `unit`: a panel's rows, or a tile's."""
        step = max(1, SLICE_VALUES // self.cols // unit) * unit
        return [(start, min(start + step, self.part.rows)) for start in range(0, self.part.rows, step)]

    def codes(self, start: int, stop: int) -> CodeRows:
        """Rows of the part, checked."""
        rows = self.matrix.read(stored_rows(self.part, start, stop))
        rows = rows if self.part.columns is None else select_columns(rows, self.part.columns, self.format)
        if not np.isfinite(rows.scales).all():
            raise self.module.bad("a scale is not a finite number")
        if self.format.codes == "e4m3" and ((rows.codes & 127) == 127).any():
            raise self.module.bad("a float8 value is not a number")
        if rows.tables is not None and not np.isfinite(rows.tables).all():
            raise self.module.bad("a table has a value that is not a finite number")
        return rows

    def values(self, start: int, stop: int) -> NDArray[np.float32]:
        """The dequantized rows, [rows, width], in the order of the inputs."""
        values = dequantize(self.format, self.codes(start, stop))
        if self.order is None:
            return values
        in_order = np.empty_like(values)
        in_order[:, self.order] = values
        return in_order

    def fill(self, out: Tensor) -> list[Work]:
        return [partial(self._fill, out, *rows) for rows in self.slices()]

    def _fill(self, out: Tensor, start: int, stop: int) -> None:
        import torch

        out[start:stop].copy_(torch.from_numpy(self.values(start, stop)))

    def pack(self, panels: Any, first: int, native: Native) -> list[Work]:
        return [partial(self._pack, panels, first, *rows) for rows in self.slices()]

    def _pack(self, panels: Any, first: int, start: int, stop: int) -> None:
        pack_codes(panels, first + start, self.format, self.codes(start, stop))

    def put(self, weight: Mxfp4Codes, first: int) -> list[Work]:
        return [partial(self._put, weight, first, *rows) for rows in self.slices()]

    def _put(self, weight: Mxfp4Codes, first: int, start: int, stop: int) -> None:
        import torch

        rows = self.codes(start, stop)
        exponents = np.frexp(rows.scales)[1] + (SCALE_BIAS - 1)  # scales are powers of two
        if exponents.max(initial=0) > MAX_SCALE:
            most = 2.0 ** (MAX_SCALE - SCALE_BIAS)
            raise self.module.unsupported(
                f"a scale is {rows.scales.max():g}, and quire's GPU kernels take up to {most:g}"
            )
        weight.put(first + start, torch.from_numpy(rows.codes), torch.from_numpy(exponents.clip(0).astype(np.uint8)))

    def unpack(self, native: Native) -> NDArray[np.float32]:
        raise AssertionError("a vector is not stored as codes")


def is_mxfp4_expert(stored: StoredPart) -> bool:
    """Whether a GPU's kernels of experts take its codes as they are."""
    return isinstance(stored, CodePart) and stored.part.expert is not None and is_mxfp4(stored.format)


def is_mxfp4(format: CodeFormat) -> bool:
    return format.codes == "table" and format.table == E2M1 and format.group == MXFP4_GROUP


@dataclass(frozen=True, slots=True)
class TransposedPart:
    """Columns of a transposed matrix that is stored as codes, such as the keys of a head in latent attention's
    `kv_b_proj`. Groups lie along the other axis then, so the values become float32. It is a `StoredPart`."""

    codes: CodePart  # the columns, as rows of the stored matrix
    part: Part
    quantized = True
    order = None
    panel_format = "f32"
    tile_format = None

    @classmethod
    def of(cls, module: Module, matrix: CodeMatrix, part: Part) -> TransposedPart:
        """`part` has all of the stored columns as its rows."""
        columns = part.columns or range(module.rows)
        rows = Part(part.name, len(columns), offset=columns.start, fused_rows=module.rows)
        return cls(CodePart(module, matrix, rows), part)

    @property
    def cols(self) -> int:
        return self.codes.module.rows

    @property
    def tensors(self) -> dict[str, Shape]:
        return self.codes.tensors

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes

    def tile_rows(self, device: str) -> Iterator[tuple[int, Callable[[], TileRows]]]:
        raise AssertionError("dense values have no codes")

    def values(self) -> NDArray[np.float32]:
        return np.ascontiguousarray(self.codes.values(0, self.codes.part.rows).T)

    def fill(self, out: Tensor) -> list[Work]:
        import torch

        def copy() -> None:
            out.copy_(torch.from_numpy(self.values()))

        return [copy]

    def pack(self, panels: Any, first: int, native: Native) -> list[Work]:
        def pack_all() -> None:
            values = self.values()
            panels.pack_dense("f32", address(values), values.shape[1], first, len(values))

        return [pack_all]

    def unpack(self, native: Native) -> NDArray[np.float32]:
        raise AssertionError("a vector is not stored as codes")


def whole_groups(columns: range, format: CodeFormat) -> bool:
    return columns.start % format.group == 0 and columns.stop % format.group == 0


def stored_rows(part: Part, start: int, stop: int) -> Rows:
    """The rows of the stored matrix: a slice if they are next to each other."""
    runs = part.stored_runs(start, stop)
    if len(runs) == 1 and runs[0].step == 1:
        return slice(runs[0].start, runs[0].stop)
    return np.concatenate([np.arange(run.start, run.stop, run.step) for run in runs])


def select_columns(rows: CodeRows, columns: range, format: CodeFormat) -> CodeRows:
    groups = slice(columns.start // format.group, columns.stop // format.group)
    return CodeRows(
        np.ascontiguousarray(rows.codes[:, columns.start : columns.stop]),
        np.ascontiguousarray(rows.scales[:, groups]),
        None if rows.zeros is None else np.ascontiguousarray(rows.zeros[:, groups]),
        rows.tables,
    )
