"""SafetensorsCheckpoint: the parts of a model out of the safetensors files of a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.layers.source import Part, Shape
from quire.quant.weight import Weight
from quire.weights.checkpoint import StoredPart, Work, part_bytes
from quire.weights.names import text_name
from quire.weights.safetensors import SafetensorsFiles

COPY_BYTES = 1 << 24  # of a plain tensor, that one thread copies to the device at a time


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
        return part_bytes(self.files.tensors[self.name].nbytes, self.part, self.cols)

    @property
    def panel_format(self) -> str:
        return {"F16": "f16", "BF16": "bf16"}.get(self.files.tensors[self.name].dtype, "f32")

    def fill(self, out: Tensor) -> list[Work]:
        def copy() -> None:
            """In pieces that are cast on the device. A single `copy_` would cast a copy of the whole on the host."""
            first = 0
            for run in self._runs():
                num_rows = max(1, COPY_BYTES * len(run) // max(1, run.nbytes))
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
        """The part's rows as views of the memory-mapped file."""
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
        self._stored_names = {text_name(name): name for name in files.tensors}

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: stored.shape for name, stored in self.files.tensors.items()}

    def find(self, part: Part, cols: int | None) -> StoredPart:
        return DensePart(self.files, self._stored_names.get(part.name, part.name), part, cols)

    def weight(self, parts: Sequence[Part], cols: int, device: torch.device, dtype: torch.dtype) -> Weight | None:
        return None
