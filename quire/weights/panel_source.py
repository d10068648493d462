"""PanelSource: weights of a checkpoint for quire's own CPU kernels. Matrices are packed into panels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quire.errors import UnsupportedModel
from quire.kernels.cpu.native import Native
from quire.layers.source import Part
from quire.quant.panels import ExpertOrders, Order, PanelWeight, join, rounded_format
from quire.weights.checkpoint import Checkpoint, CheckpointSource
from quire.weights.experts import is_head


class PanelSource(CheckpointSource):
    """Panels keep the stored format. Plain matrices are quantized first if `quantize` is "int8" or "int4"."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        native: Native,
        *,
        quantize: str | None = None,
        on_read: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(checkpoint, native.threads, on_read)
        self._native = native
        self._quantize = quantize

    def matrix(self, parts: Sequence[Part], cols: int) -> PanelWeight:
        found, width = [self._find(part, cols) for part in parts], parts[0].width(cols)
        formats = [
            rounded_format(stored.panel_format, part.name, width, self._quantize)
            for part, stored in zip(parts, found, strict=True)
        ]
        orders = [stored.order for stored in found]
        expert_orders = None
        if parts[0].expert is not None:
            expert_orders, orders = orders_by_expert(parts, orders, width), [None] * len(orders)
            if len(set(formats)) > 1:
                formats = ["f32"] * len(formats)  # experts are in panels of one format
        same = [next(i for i, other in enumerate(orders) if same_order(other, order)) for order in orders]
        joined = join([part.rows for part in parts], list(zip(formats, same, strict=True)))
        make_panels = self._native.module.Panels
        panels = [make_panels(kind, sum(parts[i].rows for i in indices), width) for (kind, _), indices in joined]
        for (_, indices), target in zip(joined, panels, strict=True):
            first = 0
            for i in indices:
                self._submit(found[i], found[i].pack(target, first, self._native))
                first += parts[i].rows
        weight = PanelWeight(panels, self._native, [orders[which] for (_, which), _ in joined], expert_orders)
        self.nbytes += weight.nbytes
        return weight

    def vector(self, parts: Sequence[Part], *, plus_one: bool = False) -> Any:
        found = [self._find(part, None) for part in parts]
        values = np.concatenate([stored.unpack(self._native) for stored in found])
        for stored in found:
            self._report(stored)
        self.nbytes += values.nbytes
        return values + np.float32(1.0) if plus_one else values

    def scalar(self, value: float) -> float:
        return float(np.float32(value))


def orders_by_expert(parts: Sequence[Part], orders: Sequence[Order | None], cols: int) -> ExpertOrders | None:
    """The order of each expert's inputs [experts, cols], or None if all are in order."""
    if all(order is None for order in orders):
        return None
    if is_head(parts[0]):
        raise UnsupportedModel(
            f"{parts[0].name}: its inputs are in an order of their own (act-order), which quire does not read for the "
            "matrices of latent attention. Use a file that was quantized without desc_act."
        )
    found: dict[int, Order | None] = {}
    for part, order in zip(parts, orders, strict=True):
        assert part.expert is not None
        if not same_order(found.setdefault(part.expert[0], order), order):
            raise UnsupportedModel(
                f"{part.name}: its inputs are in another order (act-order) than those of the same expert's gate, and "
                "quire multiplies both at once. Use a file that was quantized without desc_act."
            )
    in_order = np.arange(cols)
    return np.array([in_order if order is None else order for order in found.values()], np.int32)


def same_order(order: Order | None, other: Order | None) -> bool:
    return order is other or (order is not None and other is not None and np.array_equal(order, other))
