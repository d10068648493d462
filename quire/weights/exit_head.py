"""Exit heads in files: a directory with `config.json` and safetensors, as `quire train-draft --kind exit` writes it.

`engine/self_speculation.py` loads one for `--speculate self:DIR` and for `--exit-head DIR`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.kernels import Kernels
from quire.models.exit_head import ExitHead, ExitHeadConfig
from quire.weights.fields import Fields
from quire.weights.heads import MAX_RANK, Target, build_head, count_rows, read_draft_ids, read_head_config
from quire.weights.safetensors import SafetensorsFiles

MAX_POINTS = 1000  # of a calibration

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ExitCalibration:
    """How often the whole model chooses the exit's likeliest token, by that token's probability."""

    probabilities: tuple[float, ...]  # ascending
    agreements: tuple[float, ...]

    def confidence(self, probability: float) -> float:
        """Linear between the points, the last point's above it, and towards 0 below the first. NaN for NaN."""
        if math.isnan(probability):
            return math.nan  # a table of one point would give its number
        xs, ys = self.probabilities, self.agreements
        if xs[0] > 0:
            xs, ys = (0.0, *xs), (0.0, *ys)
        return float(np.interp(probability, xs, ys))


@dataclass(frozen=True, slots=True)
class LoadedExit:
    head: ExitHead
    draft_ids: Ids
    calibration: ExitCalibration

    @property
    def layer(self) -> int:
        return self.head.config.layer


def load_exit_head(directory: Path, target: Target, ops: Kernels) -> LoadedExit:
    fields = read_head_config(directory, "exit", target)
    if not fields.has("quire_head"):
        raise fields.bad("quire_head is missing, so this is no head that quire train-draft has made")
    config = read_exit_config(fields, target)
    calibration = read_calibration(fields)
    files = SafetensorsFiles(directory)
    extra = {"draft_ids": (count_rows(files, "draft_ids"),)}
    size = target.config.hidden_size
    head = build_head(files, lambda source: ExitHead(config, source, ops, size), ops, extra)
    return LoadedExit(head, read_draft_ids(files, fields, target.config.vocab_size), calibration)


def read_exit_config(fields: Fields, target: Target) -> ExitHeadConfig:
    layer, num_layers = fields.count("layer"), target.config.num_layers
    if layer >= num_layers:
        raise fields.bad(f"layer is {layer}, and must be from 1 to {num_layers - 1}: the model has {num_layers} layers")
    return ExitHeadConfig(layer, fields.count("rank", most=MAX_RANK), fields.number("rms_norm_eps"))


def read_calibration(fields: Fields) -> ExitCalibration:
    points: Any = fields.get("calibration")
    if not isinstance(points, list) or not 1 <= len(points) <= MAX_POINTS or not all(map(is_point, points)):
        raise fields.bad(
            f"calibration must be a list of 1 to {MAX_POINTS:,} pairs of numbers from 0 to 1: a probability, and how "
            "often the whole model agrees"
        )
    probabilities, agreements = zip(*points, strict=True)
    if any(before > after for before, after in pairwise(probabilities)):
        raise fields.bad("the probabilities of calibration must be ascending")
    return ExitCalibration(tuple(map(float, probabilities)), tuple(map(float, agreements)))


def is_point(point: object) -> bool:
    return isinstance(point, list) and len(point) == 2 and all(map(is_share, point))


def is_share(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1  # type: ignore[operator]
