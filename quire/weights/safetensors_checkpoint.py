"""SafetensorsCheckpoint: the parts of a model out of the safetensors files of a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.kernels.cpu.native import Native
from quire.kernels.cpu.tape import address
from quire.layers.source import Part, Shape
from quire.quant.weight import Weight
from quire.weights import mxfp4
from quire.weights.checkpoint import StoredPart, Work, part_bytes
from quire.weights.code_part import CodePart, TransposedPart
from quire.weights.experts import safetensors_part
from quire.weights.family_names import file_name
from quire.weights.names import safetensors_name, text_name
from quire.weights.safetensors import SafetensorsFiles
from quire.weights.schemes.scheme import Module, Scheme

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from quire.quant.tile_packing import TileRows

COPY_BYTES = 1 << 24  # of a plain tensor, that one thread copies to the device at a time
PANEL_FORMATS = {"F16": "f16", "BF16": "bf16"}  # others become float32


@dataclass(frozen=True, slots=True)
class DensePart:
    """Rows of a plain tensor in safetensors files."""

    files: SafetensorsFiles
    name: str
    part: Part
    cols: int | None
    quantized = False
    order = None
    tile_format = None

    @property
    def tensors(self) -> dict[str, Shape]:
        return {self.name: self.part.stored_shape(self.cols)}

    @property
    def nbytes(self) -> int:
        return part_bytes(self.files.tensors[self.name].nbytes, self.part, self.cols)

    @property
    def panel_format(self) -> str:
        return PANEL_FORMATS.get(self.files.tensors[self.name].dtype, "f32")

    def fill(self, out: Tensor) -> list[Work]:
        import torch

        is_bfloat16 = self.files.tensors[self.name].dtype == "BF16"

        def copy() -> None:
            """In pieces that are cast on the device. A single `copy_` would cast a copy of the whole on the host."""
            first = 0
            for stored_run in self._runs():
                run = torch.from_numpy(stored_run)
                run = run.view(torch.bfloat16) if is_bfloat16 else run
                num_rows = max(1, COPY_BYTES * len(run) // max(1, run.nbytes))
                for piece in torch.split(run, num_rows):
                    target = out[first : first + len(piece)]
                    target.copy_(piece if piece.dtype == out.dtype else piece.to(out.device))
                    first += len(piece)

        return [copy]

    def tile_rows(self, device: str) -> Iterator[tuple[int, Callable[[], TileRows]]]:
        raise AssertionError("a plain tensor has no codes")

    def pack(self, panels: Any, first: int, native: Native) -> list[Work]:
        def pack_all() -> None:
            runs = self._runs()
            values = np.ascontiguousarray(runs[0] if len(runs) == 1 else np.concatenate(runs))
            values = values.astype(np.float32) if values.dtype == np.float64 else values
            panels.pack_dense(self.panel_format, address(values), values.shape[1], first, len(values))

        return [pack_all]

    def unpack(self, native: Native) -> NDArray[np.float32]:
        return self.unpack_floats()

    def unpack_floats(self) -> NDArray[np.float32]:
        """The values of a vector or of a matrix."""
        values = np.concatenate(self._runs())
        if self.files.tensors[self.name].dtype == "BF16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32)

    def _runs(self) -> list[NDArray[Any]]:
        """The part's rows as views of the memory-mapped file."""
        stored = self.files.read_floats(self.name)
        if self.part.stacked and self.part.expert is not None:
            stored = stored[self.part.expert[0]]
        if self.part.transposed and self.cols is not None:
            stored = stored.T
        if self.part.columns is not None:
            stored = stored[:, self.part.columns.start : self.part.columns.stop]
        return [stored[run.start : run.stop : run.step] for run in self.part.stored_runs(0, self.part.rows)]


class SafetensorsCheckpoint:
    """The tensors of a Hugging Face directory. `scheme` says how quantized matrices are stored, if there are any."""

    def __init__(self, files: SafetensorsFiles, family: str = "llama", scheme: Scheme | None = None) -> None:
        self.files = files
        self.family = family
        self.scheme = scheme
        self._stored_names = {text_name(name, family): name for name in files.tensors}

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: stored.shape for name, stored in self.files.tensors.items()}

    def find(self, part: Part, cols: int | None) -> StoredPart:
        part = safetensors_part(part, self.family)
        if part.stacked and cols is not None and f"{part.name}_blocks" in self.files.tensors:
            return mxfp4.of_directory(self.files, replace(part, transposed=False), cols)
        return self._find_codes(part, cols) or DensePart(self.files, self._stored_name(part.name), part, cols)

    def _stored_name(self, name: str) -> str:
        name = safetensors_name(name, self.family)
        return self._stored_names.get(name) or file_name(name, self.family)

    def _find_codes(self, part: Part, cols: int | None) -> CodePart | TransposedPart | None:
        if self.scheme is None or cols is None or not part.name.endswith(".weight"):
            return None
        is_head = part.transposed and part.expert is not None and not part.stacked
        if part.transposed and not is_head:
            return None
        rows, inputs = (cols, part.stored_rows) if is_head else (part.stored_rows, cols)
        module = Module(self.files, self._stored_name, part.name.removesuffix(".weight"), rows, inputs)
        matrix = self.scheme.matrix(module)
        if matrix is None:
            return None
        return TransposedPart.of(module, matrix, part) if is_head else CodePart.of(module, matrix, part)

    def may_stay_unread(self, name: str) -> bool:
        return self.scheme is not None and self.scheme.may_stay_unread(name, self.files)

    def weight(self, parts: Sequence[Part], cols: int, device: str, dtype: torch.dtype) -> Weight | None:
        if len(parts) != 1:
            return None
        found = self._find_codes(safetensors_part(parts[0], self.family), cols)
        if not isinstance(found, CodePart):
            return None
        from quire.quant.code_blocks import CodeBlocks

        weight = CodeBlocks(found.format, found.order, found.width, device, dtype)
        for start, stop in found.slices():
            weight.append(found.codes(start, stop))
        weight.finish()
        return weight
