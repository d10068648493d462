"""RandomTiles: random weights, rounded as `--quantize` rounds them on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.layers.source import Part
from quire.quant.tiled import Tiled
from quire.quant.weight import Weight
from quire.weights.random_tensors import RandomTensors
from quire.weights.tiled_source import put_rounded
from quire.weights.tiles import rounded_format


class RandomTiles(RandomTensors):
    def __init__(
        self,
        seed: int,
        dtype: torch.dtype,
        device: str,
        linear: Callable[[Tensor, Tensor], Tensor],
        quantize: str,
        *,
        exact: bool,
    ) -> None:
        super().__init__(seed, dtype, device, linear)
        self._quantize = quantize
        self._exact = exact

    def matrix(self, parts: Sequence[Part], cols: int) -> Weight:
        dense = self._dense(parts, cols)
        format = rounded_format(parts[0], dense.shape[1], self._quantize)
        if format is None:
            return dense
        weight = Tiled(format, dense.shape, self.device, self.dtype, exact=self._exact)
        put_rounded(weight, 0, dense.data)
        self.nbytes += weight.nbytes - dense.nbytes
        return weight
