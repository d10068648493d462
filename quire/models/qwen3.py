"""Qwen3: a Llama that norms each head of its queries and keys before it rotates them."""

from __future__ import annotations

from quire.kernels import Kernels
from quire.layers.source import Source
from quire.models.config import ModelConfig
from quire.models.llama import Llama


class Qwen3(Llama):
    """A Llama with normed queries and keys."""

    def __init__(self, config: ModelConfig, source: Source, ops: Kernels) -> None:
        super().__init__(config, source, ops, qk_norm=True)
