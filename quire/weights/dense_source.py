"""DenseSource: weights of a checkpoint as torch tensors, dense or in their quantized blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from quire.layers.source import Part
from quire.quant.dense import Dense, Stacked
from quire.quant.mxfp4_codes import Mxfp4Codes
from quire.quant.weight import Weight
from quire.weights.checkpoint import Checkpoint, CheckpointSource, StoredPart
from quire.weights.code_part import CodePart, is_mxfp4_expert


class DenseSource(CheckpointSource):
    """Matrices become dense in `dtype`. With `packed`, matrices stored in quantized blocks keep their blocks. With
    `keeps_mxfp4`, experts in MXFP4 keep their codes, for a GPU's kernels.

    Torch runs on one thread meanwhile: splitting thousands of small ops over torch's threads costs more in
    synchronization than it saves, most of all on a busy machine.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: str,
        *,
        packed: bool = False,
        keeps_mxfp4: bool = False,
        linear: Callable[[Tensor, Tensor], Tensor] = functional.linear,
        on_read: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(checkpoint, torch.get_num_threads(), on_read)
        self.dtype = dtype
        self.device = device
        self.keep_packed = packed
        self.keeps_mxfp4 = keeps_mxfp4
        self._linear = linear

    def __enter__(self) -> Self:
        torch.set_num_threads(1)
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            super().__exit__(kind, error, at)
        finally:
            torch.set_num_threads(self._threads)

    def matrix(self, parts: Sequence[Part], cols: int) -> Weight:
        weight: Weight
        found = [self._find(part, cols) for part in parts] if self.keeps_mxfp4 and parts[0].expert else []
        if found and all(map(is_mxfp4_expert, found)):
            weight = self._mxfp4(parts, cols, found)
        else:
            weight = self._as_stored(parts, cols) if self.keep_packed else self._dense(parts, cols)
        self.nbytes += weight.nbytes
        return weight

    def vector(self, parts: Sequence[Part], *, plus_one: bool = False) -> Tensor:
        """Filled before it is returned. With `plus_one` it is float32: 1 + w would lose most of w's bits in a
        half-precision type."""
        out = torch.empty(sum(part.rows for part in parts), dtype=self.dtype, device=self.device)
        for part, rows in zip(parts, torch.split(out, [part.rows for part in parts]), strict=True):
            stored = self._find(part, None)
            for work in stored.fill(rows):
                work()
            self._report(stored)
        out = 1.0 + out.float() if plus_one else out
        self.nbytes += out.nbytes
        return out

    def scalar(self, value: float) -> Tensor:
        return torch.tensor(value, dtype=self.dtype, device=self.device)

    def _dense(self, parts: Sequence[Part], cols: int) -> Dense:
        """Each part is written directly into its rows of the fused matrix, so no weight is in memory twice."""
        num_rows = [part.rows for part in parts]
        out = torch.empty(sum(num_rows), parts[0].width(cols), dtype=self.dtype, device=self.device)
        for part, rows in zip(parts, torch.split(out, num_rows), strict=True):
            stored = self._find(part, cols)
            self._submit(stored, stored.fill(rows))
        return Dense(out, self._linear)

    def _mxfp4(self, parts: Sequence[Part], cols: int, found: Sequence[StoredPart]) -> Mxfp4Codes:
        weight, first = Mxfp4Codes(sum(part.rows for part in parts), parts[0].width(cols), self.device, self.dtype), 0
        for part, stored in zip(parts, found, strict=True):
            assert isinstance(stored, CodePart)
            self._submit(stored, stored.put(weight, first))
            first += part.rows
        return weight

    def _as_stored(self, parts: Sequence[Part], cols: int) -> Weight:
        found = [self._find(part, cols) for part in parts]
        if not any(stored.quantized for stored in found):
            return self._dense(parts, cols)
        weight = self.checkpoint.weight(parts, cols, self.device, self.dtype)
        if weight is None and len(parts) == 1:  # of a type that torch's ops cannot keep packed
            return self._dense(parts, cols)
        if weight is None:
            return Stacked([self._as_stored([part], cols) for part in parts])
        for stored in found:
            self._report(stored)
        return weight
