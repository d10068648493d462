"""RandomTensors: random weights as torch tensors. On a CPU numpy draws them, as for quire's own kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from quire.layers.source import Part
from quire.quant.dense import Dense
from quire.quant.weight import Weight
from quire.weights.random_weights import (
    VECTOR_STD,
    columns_of,
    draw,
    select_rows,
    stored_shape,
    tensor_seed,
    vector_mean,
)


class RandomTensors:
    def __init__(
        self,
        seed: int,
        dtype: torch.dtype,
        device: str,
        linear: Callable[[Tensor, Tensor], Tensor] = functional.linear,
    ) -> None:
        self.seed = seed
        self.dtype = dtype
        self.device = device
        self.nbytes = 0
        self._linear = linear

    def matrix(self, parts: Sequence[Part], cols: int) -> Weight:
        return self._dense(parts, cols)

    def _dense(self, parts: Sequence[Part], cols: int) -> Dense:
        num_rows = [part.rows for part in parts]
        out = torch.empty(sum(num_rows), parts[0].width(cols), dtype=self.dtype, device=self.device)
        for part, rows in zip(parts, torch.split(out, num_rows), strict=True):
            self._draw(part, rows, cols, 0.0, cols**-0.5)
        self.nbytes += out.nbytes
        return Dense(out, self._linear)

    def vector(self, parts: Sequence[Part], *, plus_one: bool = False) -> Tensor:
        num_rows = [part.rows for part in parts]
        out = torch.empty(sum(num_rows), dtype=self.dtype, device=self.device)
        for part, rows in zip(parts, torch.split(out, num_rows), strict=True):
            self._draw(part, rows, None, vector_mean(part), VECTOR_STD)
        out = 1.0 + out.float() if plus_one else out
        self.nbytes += out.nbytes
        return out

    def scalar(self, value: float) -> Tensor:
        return torch.tensor(value, dtype=self.dtype, device=self.device)

    def _draw(self, part: Part, out: Tensor, cols: int | None, mean: float, std: float) -> None:
        """The whole tensor is drawn and the part is taken from it, so that the values do not depend on the split."""
        if self.device == "cpu":
            out.copy_(torch.from_numpy(draw(self.seed, part, cols, mean, std)))
            return
        whole = stored_shape(part, cols)
        target = out if out.shape == whole else out.new_empty(whole)
        generator = torch.Generator(self.device).manual_seed(tensor_seed(self.seed, part.name))
        target.normal_(mean, std, generator=generator)
        if target is not out:
            rows = torch.cat(select_rows(target, part))
            out.copy_(rows if cols is None else rows[:, columns_of(part)])
