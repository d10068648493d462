"""ExitHead: from the hidden state after a few layers of a model to the input of its output matrix.

`weights/exit_head.py` loads it, `engine/exit_logits.py` runs it. Without training, the model's own last norm takes its
place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.kernels import Kernels
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.source import Part, Source


@dataclass(frozen=True, slots=True)
class ExitHeadConfig:
    """`layer`: how many layers of the model come before it."""

    layer: int
    rank: int
    norm_eps: float


class ExitHead:
    """y = x + adapter_up(silu(adapter_down(norm(x)))); the output is out_norm(y)."""

    def __init__(self, config: ExitHeadConfig, source: Source, ops: Kernels, hidden_size: int) -> None:
        eps = config.norm_eps
        self.config = config
        self.ops = ops
        self.norm = RMSNorm(source, ops, "norm", size=hidden_size, eps=eps)
        self.adapter_down = Linear(source, [Part("adapter_down", config.rank)], hidden_size)
        self.adapter_up = Linear(source, [Part("adapter_up", hidden_size)], config.rank)
        self.out_norm = RMSNorm(source, ops, "out_norm", size=hidden_size, eps=eps)

    def __call__(self, x: Any) -> Any:
        """x [n, hidden_size] -> [n, hidden_size]"""
        inner = self.ops.activate(self.adapter_down(self.norm(x)), "silu")
        return self.out_norm.add(self.adapter_up(inner), x)[0]
