"""Gemma 3, text model: norms before and after attention and MLP, normed queries and keys, scaled embeddings.

Most layers have a sliding window and rotate with `ModelConfig.local_rope`. The others have full attention.
"""

from __future__ import annotations

from functools import partial
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


class Gemma3Layer:
    """x = x + norm(attention(norm(x))); x = x + norm(mlp(norm(x)))."""

    def __init__(self, config: ModelConfig, source: Source, ops: Kernels, index: int, rotary: RotaryTable) -> None:
        name = f"model.layers.{index}"
        norm = partial(build_norm, config, source, ops, size=config.hidden_size)
        self.input_norm = norm(f"{name}.input_layernorm")
        self.attention = build_attention(config, source, ops, index, rotary)
        self.post_attention_norm = norm(f"{name}.post_attention_layernorm")
        self.mlp_norm = norm(f"{name}.pre_feedforward_layernorm")
        self.mlp = build_mlp(config, source, ops, index)
        self.output_norm = norm(f"{name}.post_feedforward_layernorm")

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
        x = self.post_attention_norm(self.attention(x, positions, paging, cache, ends))
        if ends is not None:
            residual = residual[ends.tokens]
        x, residual = self.mlp_norm.add(x, residual)
        return self.output_norm(self.mlp(x)), residual


class Gemma3(Decoder):
    """A Decoder of Gemma3Layers, with embeddings scaled by the square root of the hidden size."""

    def __init__(self, config: ModelConfig, source: Source, ops: Kernels) -> None:
        global_table = rotary_table(config.rope, config.max_len, ops.arrays)
        local_table = rotary_table(config.local_rope, config.max_len, ops.arrays) if config.local_rope else global_table
        layers = [
            Gemma3Layer(config, source, ops, index, global_table if window is None else local_table)
            for index, window in enumerate(config.windows)
        ]
        super().__init__(config, source, ops, layers, embedding_scale=config.hidden_size**0.5)
