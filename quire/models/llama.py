"""Llama 2 and 3, and models of the same architecture such as SmolLM2: norm, attention, norm, gated MLP, and residuals.

`registry.py` also builds Mistral, Qwen2 and Qwen3 from it, and states how each differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.kernels import Kernels
from quire.kernels.paging import Ends, LayerCache, Paging
from quire.layers.rotary import RotaryTable
from quire.layers.source import Source
from quire.models.config import ModelConfig
from quire.models.decoder import Decoder, build_attention, build_mlp, build_norm
from quire.models.rope import rotary_table

if TYPE_CHECKING:
    from torch import Tensor


class LlamaLayer:
    """x = x + attention(norm(x)); x = x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, source: Source, ops: Kernels, index: int, rotary: RotaryTable) -> None:
        name, size = f"model.layers.{index}", config.hidden_size
        self.input_norm = build_norm(config, source, ops, f"{name}.input_layernorm", size)
        self.attention = build_attention(config, source, ops, index, rotary)
        self.mlp_norm = build_norm(config, source, ops, f"{name}.post_attention_layernorm", size)
        self.mlp = build_mlp(config, source, ops, index)

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        paging: Paging,
        cache: LayerCache,
        ends: Ends | None = None,
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_norm.add(x, residual)
        x = self.attention(x, positions, paging, cache, ends)
        if ends is not None:
            residual = residual[ends.tokens]
        x, residual = self.mlp_norm.add(x, residual)
        return self.mlp(x), residual


class Llama(Decoder):
    """A Decoder of LlamaLayers."""

    def __init__(self, config: ModelConfig, source: Source, ops: Kernels) -> None:
        rotary = rotary_table(config.rope, config.max_len, ops.arrays)
        layers = [LlamaLayer(config, source, ops, index, rotary) for index in range(config.num_layers)]
        super().__init__(config, source, ops, layers)
