"""RandomWeights: a source of weights that come from a seed instead of a file, for benchmarks and tests.

What a tensor holds depends on the seed and its name alone, not on the order of asking or on fusing. The same seed gives
other numbers on another kind of device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels.cpu.native import Native
from quire.quant.panels import PanelWeight, rounded_format
from quire.quant.weight import Dense, Weight

SPREAD = 0.05  # of norm weights around one, and of biases around zero


class RandomWeights:
    """Matrices are normal with deviation 1 / sqrt(cols), so activations keep their size from layer to layer."""

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

    def matrix(self, parts: Sequence[tuple[str, int]], cols: int) -> Weight:
        out = torch.empty(sum(rows for _, rows in parts), cols, dtype=self.dtype, device=self.device)
        for (name, _), part in zip(parts, torch.split(out, [rows for _, rows in parts]), strict=True):
            part.normal_(0.0, cols**-0.5, generator=self._generator(name))
        weight = Dense(out, self._linear) if self._native is None else self._pack(self._native, parts[0][0], out)
        self.nbytes += weight.nbytes
        return weight

    def _pack(self, native: Native, name: str, values: Tensor) -> PanelWeight:
        """For our own kernels, rounded as a checkpoint's would be."""
        rows, cols = values.shape
        panels = native.module.Panels(rounded_format("f32", name, cols, self._quantize), rows, cols)
        panels.pack_dense("f32", values.float().data_ptr(), cols, 0, rows)
        return PanelWeight([panels], native)

    def vector(self, parts: Sequence[tuple[str, int]]) -> Tensor:
        out = torch.empty(sum(size for _, size in parts), dtype=self.dtype, device=self.device)
        for (name, _), part in zip(parts, torch.split(out, [size for _, size in parts]), strict=True):
            mean = 0.0 if name.endswith(".bias") else 1.0
            part.normal_(mean, SPREAD, generator=self._generator(name))
        self.nbytes += out.nbytes
        return out

    def _generator(self, name: str) -> torch.Generator:
        digest = blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest, "little") >> 1)
