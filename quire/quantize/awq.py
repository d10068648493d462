"""AWQ: columns of a matrix that see large inputs are scaled up before rounding, and the inputs are scaled down.

The inputs' factor is folded into what makes them: a norm's weight, or the rows of the matrix before. So a layer has to
be changed as a whole, before its matrices are rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.models.config import ModelConfig
from quire.quantize.rounding import Groups, nearest_codes
from quire.quantize.statistics import InputStatistics

Floats = NDArray[np.float32]

STEPS = 20  # exponents from 0 on that are tried
NORMS = {"qkv": ("input_layernorm",), "gate_up": ("pre_feedforward_layernorm", "post_attention_layernorm")}


@dataclass(frozen=True, slots=True)
class Fold:
    """Matrices that share an input, and what makes it: a vector, or the rows of a matrix and its bias."""

    matrices: tuple[str, ...]
    norm: str | None = None
    rows: str | None = None

    @property
    def names(self) -> set[str]:
        """All matrices that it changes."""
        return {*self.matrices} | ({f"{self.rows}.weight"} if self.rows else set())


def folds_of(layer: int, config: ModelConfig, vectors: Mapping[str, Floats], names: Set[str]) -> list[Fold]:
    """The inputs of a layer that can be scaled. The order is that in which they must be treated.

    A norm that two products share is left alone, and so are the rows before an activation. So are experts: their norm
    makes the inputs of the router too. `names` are the layer's matrices.
    """
    prefix, structure = f"model.layers.{layer}", config.structure
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    folds = []
    if config.num_heads == config.num_kv_heads:
        folds.append(Fold((f"{attention}.o_proj.weight",), rows=f"{attention}.v_proj"))
    if structure.gated:
        folds.append(Fold((f"{mlp}.down_proj.weight",), rows=f"{mlp}.up_proj"))
    if structure.norms != "after" and not structure.shared_norm:
        mlp_kinds = ("gate", "up") if structure.gated else ("up",)
        for matrices, norms in (
            (tuple(f"{attention}.{letter}_proj.weight" for letter in "qkv"), NORMS["qkv"]),
            (tuple(f"{mlp}.{kind}_proj.weight" for kind in mlp_kinds), NORMS["gate_up"]),
        ):
            folds.append(Fold(matrices, norm=next(name for name in norm_names(prefix, norms) if name in vectors)))
    return [fold for fold in folds if fold.names <= names]


def norm_names(prefix: str, norms: Sequence[str]) -> list[str]:
    return [f"{prefix}.{norm}.weight" for norm in norms]


def scale_layer(
    layer: int,
    config: ModelConfig,
    values: dict[str, Floats],
    vectors: Mapping[str, Floats],
    statistics: Mapping[str, object],
    group: int,
) -> None:
    """Scale the layer's matrices, vectors and statistics in place. The layer computes the same as before."""
    for fold in folds_of(layer, config, vectors, values.keys()):
        found = statistics[fold.matrices[0]]
        assert isinstance(found, InputStatistics)
        factors = search([values[name] for name in fold.matrices], found, group)
        for name in fold.matrices:
            values[name] = values[name] * factors
        found.scale_inputs(factors)
        if fold.norm is not None:
            divide(vectors, fold.norm, factors)
            divide(vectors, fold.norm.removesuffix("weight") + "bias", factors)
        if fold.rows is not None:
            values[f"{fold.rows}.weight"] = values[f"{fold.rows}.weight"] / factors[:, None]
            divide(vectors, f"{fold.rows}.bias", factors)


def divide(vectors: Mapping[str, Floats], name: str, factors: Floats) -> None:
    if name in vectors:
        vectors[name] /= factors


def search(matrices: Sequence[Floats], statistics: InputStatistics, group: int) -> Floats:
    """The factor of each column [cols] whose rounded matrices give the outputs with the least error."""
    x, magnitudes = statistics.sample, np.maximum(statistics.mean_magnitudes, np.float32(1e-8))
    best, least = np.ones_like(magnitudes), np.inf
    for step in range(STEPS):
        factors = magnitudes ** np.float32(step / STEPS)
        factors = np.clip(factors / np.sqrt(factors.max() * factors.min()), 1e-4, 1e4).astype(np.float32)
        error = sum(output_error(values, factors, x, group) for values in matrices)
        if error < least:
            best, least = factors, error
    return best


def output_error(values: Floats, factors: Floats, x: Floats, group: int) -> float:
    """The squared error of the outputs if the scaled matrix is rounded to the nearest codes."""
    scaled = values * factors
    split = scaled.reshape(len(values), -1, group)
    low, high = np.minimum(split.min(2), 0), np.maximum(split.max(2), 0)
    scales = np.maximum((high - low) / np.float32(15), np.float32(1e-8))
    groups = Groups(group, 0, 15, scales, np.rint(-low / scales))
    codes = nearest_codes(scaled, groups).reshape(split.shape)
    dense = ((codes - groups.zeros[:, :, None]) * scales[:, :, None]).reshape(values.shape) / factors
    return float(np.square(x @ (values - dense).T, dtype=np.float64).sum())
