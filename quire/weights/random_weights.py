"""RandomWeights: a `Source` of weights drawn from a seed instead of a file, for benchmarks and tests.

A tensor's values depend only on the seed, its name and the kind of device: neither on the order of calls nor on fusing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels.cpu.native import Native
from quire.layers.source import Part
from quire.quant.panels import PanelWeight, rounded_format
from quire.quant.weight import Dense, Weight

VECTOR_STD = 0.05  # of norm weights around one, and of biases around zero


class RandomWeights:
    """Matrices are normal with std 1 / sqrt(cols), so the scale of activations does not change over the layers."""

    def __init__(
        self,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        linear: Callable[[Tensor, Tensor], Tensor] = functional.linear,
        native: Native | None = None,
        quantize: str | None = None,
    ) -> None:
        self.seed = seed
        self.dtype = dtype
        self.device = device
        self.nbytes = 0
        self._linear = linear
        self._native = native
        self._quantize = quantize

    def matrix(self, parts: Sequence[Part], cols: int) -> Weight:
        num_rows, width = [part.rows for part in parts], parts[0].width(cols)
        out = torch.empty(sum(num_rows), width, dtype=self.dtype, device=self.device)
        for part, rows in zip(parts, torch.split(out, num_rows), strict=True):
            self._draw(part, rows, cols, 0.0, cols**-0.5)
        weight = Dense(out, self._linear) if self._native is None else self._pack(self._native, parts[0].name, out)
        self.nbytes += weight.nbytes
        return weight

    def _pack(self, native: Native, name: str, values: Tensor) -> PanelWeight:
        """Pack for quire's own kernels, quantized in the same way as a checkpoint's weights."""
        rows, cols = values.shape
        panels = native.module.Panels(rounded_format("f32", name, cols, self._quantize), rows, cols)
        panels.pack_dense("f32", values.float().data_ptr(), cols, 0, rows)
        return PanelWeight([panels], native)

    def vector(self, parts: Sequence[Part]) -> Tensor:
        num_rows = [part.rows for part in parts]
        out = torch.empty(sum(num_rows), dtype=self.dtype, device=self.device)
        for part, rows in zip(parts, torch.split(out, num_rows), strict=True):
            self._draw(part, rows, None, 0.0 if part.name.endswith(".bias") else 1.0, VECTOR_STD)
        self.nbytes += out.nbytes
        return out

    def _draw(self, part: Part, out: Tensor, cols: int | None, mean: float, std: float) -> None:
        """The whole tensor is drawn and the part is taken from it, so that the values do not depend on the split."""
        whole = (part.stored_rows,) if cols is None else (part.stored_rows, cols)
        target = out if out.shape == whole else out.new_empty(whole)
        target.normal_(mean, std, generator=self._generator(part.name))
        if target is not out:
            columns = slice(None) if part.columns is None else slice(part.columns.start, part.columns.stop)
            rows = torch.cat([target[run.start : run.stop : run.step] for run in part.stored_runs(0, part.rows)])
            out.copy_(rows if cols is None else rows[:, columns])

    def _generator(self, name: str) -> torch.Generator:
        digest = blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest, "little") >> 1)
