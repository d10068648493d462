"""Where a layer gets its weights from: a checkpoint, random numbers, or a list of what would be asked for.

Layers pull what they need by the name it has in a Hugging Face checkpoint ("model.layers.0.mlp.down_proj.weight"),
with the shape they expect; readers of other formats translate. A model built from a source is ready to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from quire.quant.weight import Weight


class Source(Protocol):
    def matrix(self, parts: Sequence[tuple[str, int]], cols: int) -> Weight:
        """One matrix whose rows are those of the named tensors, one below the other: parts are (name, rows)."""
        ...

    def vector(self, parts: Sequence[tuple[str, int]]) -> Tensor:
        """One dense vector, the named tensors end to end: parts are (name, length). Norm weights and biases."""
        ...
