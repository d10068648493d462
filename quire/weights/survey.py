"""Does a checkpoint fit a model? Found out before a single weight is read.

A model built on a `Survey` costs no memory and leaves a list of what it asked for; `check` holds that against what the
files have. `loader.py` calls both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from quire.errors import WeightMismatch
from quire.layers.source import Part, Shape
from quire.quant.weight import Dense, Weight

MAX_NAMED = 5  # tensors of each kind of trouble that the message names


class Survey:
    """A `Source` of tensors without data, which notes what was asked for: parts, with columns if of a matrix."""

    def __init__(self) -> None:
        self.asked: list[tuple[Part, int | None]] = []

    def matrix(self, parts: Sequence[Part], cols: int) -> Weight:
        self.asked += [(part, cols) for part in parts]
        return Dense(torch.empty(sum(part.rows for part in parts), parts[0].width(cols), device="meta"))

    def vector(self, parts: Sequence[Part]) -> Tensor:
        self.asked += [(part, None) for part in parts]
        return torch.empty(sum(part.rows for part in parts), device="meta")


def check(expected: Mapping[str, Shape], available: Mapping[str, Shape], ignored: Collection[str] = ()) -> None:
    """Raise one WeightMismatch that tells everything that does not fit."""
    missing = [f"{name} {list(shape)}" for name, shape in expected.items() if name not in available]
    left_over = [
        f"{name} {list(shape)}" for name, shape in available.items() if name not in expected and name not in ignored
    ]
    reshaped = [
        f"{name} is {list(available[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in available and available[name] != shape
    ]
    troubles = [
        listed(what, names)
        for what, names in (("missing", missing), ("left over", left_over), ("of the wrong shape", reshaped))
        if names
    ]
    if troubles:
        raise WeightMismatch(
            f"The tensors are not those of the model that the configuration describes: {'; '.join(troubles)}. "
            "Check that the file is complete, and that configuration and weights belong together."
        )


def listed(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{len(names)} {what} ({', '.join(names[:MAX_NAMED])}{more})"
