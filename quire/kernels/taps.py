"""Taps: hidden states between layers, for draft heads. `Decoder` fills them, the `record` op makes models with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.kernels.arrays import Array
from quire.kernels.paging import Ends, LayerCache, Paging


@dataclass(slots=True)
class Taps:
    """The hidden states after some layers of one forward pass: x + residual, before the next norm.

    `layers` are indices from 0, ascending. `states` has one [tokens, hidden_size] for each of them, in that order. With
    `Ends`, those after the last layer have the rows of these tokens only.
    """

    layers: tuple[int, ...]
    states: list[Any] = field(default_factory=list)

    def keep(self, x: Any, residual: Any) -> None:
        """Called by the model after each of these layers."""
        self.states.append(hidden_state(x, residual))

    def __post_init__(self) -> None:
        assert list(self.layers) == sorted(set(self.layers)), self.layers


def hidden_state(x: Any, residual: Any) -> Any:
    """The sum of what a layer returns; some families return no residual."""
    return x if residual is None else x + residual


class TappedModel:
    """A model that keeps the taps of its last call. It is called like the model it was made from."""

    def __init__(self, model: Any, tap_layers: Sequence[int]) -> None:
        self.head = model.head
        self.taps: list[Array] = []
        self._model = model
        self._layers = tuple(tap_layers)

    def __call__(
        self, tokens: Array, positions: Array, paging: Paging, kv: Sequence[LayerCache], ends: Ends | None = None
    ) -> Array:
        taps = Taps(self._layers)
        hidden: Array = self._model(tokens, positions, paging, kv, ends, taps)
        self.taps = taps.states
        return hidden
