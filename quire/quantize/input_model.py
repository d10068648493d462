"""InputModel: the model that is quantized. Its matrices are read one by one as float32, whatever their format.

`CalibrationSource` builds the model's layers without their matrices; `calibration.py` runs them one after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.errors import UnsupportedModel
from quire.kernels import Kernels
from quire.kernels.cpu.native import Native
from quire.kernels.cpu.tape import Value, address
from quire.kernels.routing import ExpertWeights
from quire.layers.source import Part
from quire.models.config import ModelConfig
from quire.models.decoder import Decoder
from quire.models.registry import MODELS
from quire.quant.panels import ROWS_IN_PANEL, PanelWeight
from quire.quantize.units import Unit, units_of
from quire.weights.checkpoint import Checkpoint
from quire.weights.experts import is_head
from quire.weights.names import LAYER

Floats = NDArray[np.float32]


def layer_of(name: str) -> int | None:
    """The index of the layer that a tensor belongs to."""
    match = LAYER.fullmatch(name.rpartition(".")[0])
    return int(match[1]) if match else None


class InputMatrix(PanelWeight):
    """A matrix of a layer, as parts. It is a `Weight` that notes what it is multiplied with.

    It has no panels until `load`. While a layer is recorded, `matmul` keeps its input.
    """

    def __init__(self, parts: Sequence[Part], cols: int, native: Native) -> None:
        super().__init__([], native)
        self.parts = list(parts)
        self.cols = cols
        self.input: Value | None = None
        self.routes: Value | None = None  # of the matrices of experts
        self.experts: ExpertWeights | None = None  # the mixture that it belongs to

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.rows for part in self.parts), self.parts[0].width(self.cols)

    def units(self, *, by_head: bool) -> list[Unit]:
        return units_of(self.parts, self.cols, by_head=by_head)

    def load(self, values: Iterable[Floats]) -> None:
        """Put the parts' values into panels of the C++ kernels, one part after the other if they fill whole panels."""
        if any(part.rows % ROWS_IN_PANEL for part in self.parts[:-1]):
            values = [np.concatenate(list(values))]
        panels, first = self.native.module.Panels("f32", *self.shape), 0
        for each in values:
            dense = np.ascontiguousarray(each, np.float32)
            assert dense.shape[1] == self.shape[1], (dense.shape, self.shape)
            panels.pack_dense("f32", address(dense), dense.shape[1], first, len(dense))
            first += len(dense)
        assert first == self.shape[0], (first, self.shape)
        self.panels, self.orders = [panels], [None]

    def drop(self) -> None:
        self.panels, self.orders, self.input, self.routes, self.experts = [], [], None, None, None

    def matmul(self, x: Any) -> Any:
        if isinstance(x, Value):
            x.read()
            self.input = x
        return super().matmul(x)


@dataclass(slots=True)
class CalibrationSource:
    """A `Source` whose matrices are read later."""

    model: InputModel
    matrices: list[InputMatrix] = field(default_factory=list)
    vectors: dict[str, Floats] = field(default_factory=dict)  # of one part each, as the layers use them
    vector_parts: list[Part] = field(default_factory=list)

    def matrix(self, parts: Sequence[Part], cols: int) -> InputMatrix:
        for part in parts:
            check_plain(part)
        self.matrices.append(InputMatrix(list(parts), cols, self.model.native))
        return self.matrices[-1]

    def vector(self, parts: Sequence[Part], *, plus_one: bool = False) -> Floats:
        """Filled now. Slices of it are the parts' values, so that a change of one is seen by the layer."""
        values = [self.model.read_vector(part) + np.float32(plus_one) for part in parts]
        joined = np.concatenate(values)
        self.vector_parts += parts
        first = 0
        for part in parts:
            self.vectors[part.name] = joined[first : first + part.rows]
            first += part.rows
        return joined

    def scalar(self, value: float) -> float:
        return float(np.float32(value))


def check_plain(part: Part) -> None:
    if is_head(part):
        return
    alone = part.stored_shape(1) == (part.rows, 1) and part.stored_rows == part.rows
    if not alone or part.order is not None or part.transposed or part.columns is not None:
        raise UnsupportedModel(
            f"{part.name} is stored together with other matrices or transposed, and quire quantizes only matrices that "
            "are stored one by one. Use a model of another family."
        )


class InputModel:
    """A checkpoint and its layers, without their matrices."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, ops: Kernels) -> None:
        assert ops.native is not None
        if config.gemma4 is not None:
            raise UnsupportedModel(
                "quire cannot quantize Gemma 4. Load it with --quantize int8 or another of its formats."
            )
        self.config = config
        self.checkpoint = checkpoint
        self.ops = replace(ops, experts=self._note_experts, store_latent=self._note_latent)
        self._plain_ops = ops
        self._latent: Value | None = None
        self.native = ops.native
        self.source = CalibrationSource(self)
        self.decoder: Decoder = MODELS[config.family](config, self.source, self.ops)
        if (
            type(self.decoder).__call__ is not Decoder.__call__
            or type(self.decoder).run_layers is not Decoder.run_layers
        ):
            raise UnsupportedModel(
                f"Models of the family {config.family!r} do not run layer by layer, so quire cannot quantize them."
            )

    @property
    def num_layers(self) -> int:
        return len(self.decoder.layers)

    def matrices(self, layer: int | None) -> list[InputMatrix]:
        """The matrices of a layer, or with None those of no layer: the embedding and the head."""
        return [matrix for matrix in self.source.matrices if layer_of(matrix.parts[0].name) == layer]

    def units(self, layer: int | None, *, by_head: bool) -> list[Unit]:
        return [unit for matrix in self.matrices(layer) for unit in matrix.units(by_head=by_head)]

    def all_units(self, *, by_head: bool) -> list[Unit]:
        return [unit for matrix in self.source.matrices for unit in matrix.units(by_head=by_head)]

    def attach_latent(self, layer: int) -> None:
        """The latents of a recorded layer are the inputs of its `kv_b_proj`."""
        if self.config.latent is not None:
            attention: Any = self.decoder.layers[layer].attention
            attention.absorb.input, self._latent = self._latent, None

    def _note_experts(
        self, x: Value, routes: Value, weights: ExpertWeights, shared: Any = None, shared_gate: Any = None
    ) -> Any:
        for matrix in (weights.gate_up, weights.down):
            matrix.input, matrix.routes, matrix.experts = x, routes, weights
        x.read()
        routes.read()
        return self._plain_ops.experts(x, routes, weights, shared, shared_gate)

    def _note_latent(self, kv: Value, rank: int, cache: Any, slots: Any) -> None:
        self._latent = Value(kv.buffer, (1, rank), kv.first)
        self._latent.read()
        self._plain_ops.store_latent(kv, rank, cache, slots)

    def vectors(self, layer: int | None) -> dict[str, Floats]:
        return {name: values for name, values in self.source.vectors.items() if layer_of(name) == layer}

    def vector_part(self, name: str) -> Part:
        return next(part for part in self.source.vector_parts if part.name == name)

    def read_vector(self, part: Part) -> Floats:
        return self.checkpoint.find(part, None).unpack(self.native)

    def read(self, part: Part, cols: int) -> Floats:
        """The values of a part, [rows, cols]."""
        stored = self.checkpoint.find(part, cols)
        panels = self.native.module.Panels("f32", part.rows, part.width(cols))
        for task in stored.pack(panels, 0, self.native):
            task()
        values = PanelWeight([panels], self.native, [stored.order]).dense()
        if not np.isfinite(values).all():
            raise UnsupportedModel(f"{part.name} has values that are no finite numbers. Check the model's file.")
        return values

    def is_quantized(self) -> bool:
        """Whether any matrix is stored in a quantized format."""
        return any(
            self.checkpoint.find(part, matrix.cols).quantized
            for matrix in self.source.matrices
            for part in matrix.parts
        )
