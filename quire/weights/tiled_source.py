"""TiledSource: weights of a checkpoint for quire's GPU kernels. Codes stay codes, in tiles; others are dense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from quire.layers.source import Part
from quire.quant.dense import Stacked
from quire.quant.panels import join
from quire.quant.tile_format import TILE_OUTPUTS, TileFormat
from quire.quant.tile_rounding import round_rows
from quire.quant.tiled import Tiled
from quire.quant.weight import Weight
from quire.weights.checkpoint import Checkpoint, StoredPart
from quire.weights.dense_source import DenseSource
from quire.weights.panel_source import same_order
from quire.weights.tiles import format_of

ROUNDED_VALUES = 1 << 22  # of a plain matrix, that are rounded at a time


class TiledSource(DenseSource):
    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: str,
        *,
        linear: Callable[[Tensor, Tensor], Tensor],
        exact: bool,
        quantize: str | None = None,
        on_read: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(checkpoint, dtype, device, keeps_mxfp4=True, linear=linear, on_read=on_read)
        self._exact = exact
        self._quantize = quantize

    def matrix(self, parts: Sequence[Part], cols: int) -> Weight:
        if parts[0].expert is not None:  # kernels of experts and heads take MXFP4 or dense matrices
            return super().matrix(parts, cols)
        found = [self._find(part, cols) for part in parts]
        formats = [format_of(part, stored, cols, self._quantize) for part, stored in zip(parts, found, strict=True)]
        orders = [stored.order for stored in found]
        same = [next(i for i, other in enumerate(orders) if same_order(other, order)) for order in orders]
        joined = join([part.rows for part in parts], list(zip(formats, same, strict=True)), TILE_OUTPUTS)
        weights: list[Weight] = []
        for (format, _), indices in joined:
            own = [parts[i] for i in indices]
            weights.append(self._dense(own, cols) if format is None else self._tiled(format, own, cols))
        weight = weights[0] if len(weights) == 1 else Stacked(weights)
        self.nbytes += weight.nbytes
        return weight

    def _tiled(self, format: TileFormat, parts: Sequence[Part], cols: int) -> Tiled:
        found = [self._find(part, cols) for part in parts]
        order = None if found[0].order is None else torch.from_numpy(found[0].order).to(self.device)
        shape = sum(part.rows for part in parts), parts[0].width(cols)
        weight = Tiled(format, shape, self.device, self.dtype, order, exact=self._exact)
        first = 0
        for part, stored in zip(parts, found, strict=True):
            if stored.quantized:
                tasks = [partial(_put, weight, first + at, read) for at, read in stored.tile_rows(self.device)]
            else:
                tasks = [partial(self._round, weight, first, stored)]
            self._submit(stored, tasks)
            first += part.rows
        return weight

    def _round(self, weight: Tiled, first: int, stored: StoredPart) -> None:
        plain = torch.empty(stored.part.rows, weight.shape[1], dtype=self.dtype, device=self.device)
        for work in stored.fill(plain):
            work()
        put_rounded(weight, first, plain)


def _put(weight: Tiled, first: int, read: Callable[[], object]) -> None:
    weight.put(first, read())  # type: ignore[arg-type]


def put_rounded(weight: Tiled, first: int, plain: Tensor) -> None:
    step = max(1, ROUNDED_VALUES // plain.shape[1] // TILE_OUTPUTS) * TILE_OUTPUTS
    for start in range(0, len(plain), step):
        weight.put(first + start, round_rows(plain[start : start + step], weight.format))
