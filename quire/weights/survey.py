"""Checks that a checkpoint matches a model, before any weight is read.

A model built on a `Survey` takes no memory and leaves a list of the parts that it declares. `check` compares the
tensors of these parts with those in the files. `loader.py` calls both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import WeightMismatch
from quire.layers.source import Part, Shape

MAX_NAMED = 5  # tensors that the message names for each kind of mismatch


@dataclass(frozen=True, slots=True)
class Declared:
    """A matrix without data."""

    shape: tuple[int, int]


class Survey:
    """A `Source` without data. It records each part, with the columns of its matrix or None for a vector."""

    def __init__(self) -> None:
        self.declared: list[tuple[Part, int | None]] = []

    def matrix(self, parts: Sequence[Part], cols: int) -> Any:
        self.declared += [(part, cols) for part in parts]
        return Declared((sum(part.rows for part in parts), parts[0].width(cols)))

    def vector(self, parts: Sequence[Part], *, plus_one: bool = False) -> Any:
        self.declared += [(part, None) for part in parts]

    def scalar(self, value: float) -> float:
        return value


def check(expected: Mapping[str, Shape], available: Mapping[str, Shape], ignored: Collection[str] = ()) -> None:
    """Raise one WeightMismatch that lists all differences."""
    missing = [f"{name} {list(shape)}" for name, shape in expected.items() if name not in available]
    unexpected = [
        f"{name} {list(shape)}" for name, shape in available.items() if name not in expected and name not in ignored
    ]
    reshaped = [
        f"{name} is {list(available[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in available and available[name] != shape
    ]
    mismatches = [
        listed(what, names)
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of the wrong shape", reshaped))
        if names
    ]
    if mismatches:
        raise WeightMismatch(
            f"The tensors do not match the model that the configuration describes: {'; '.join(mismatches)}. "
            "Check that the file is complete, and that configuration and weights belong together."
        )


def listed(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{len(names)} {what} ({', '.join(names[:MAX_NAMED])}{more})"
