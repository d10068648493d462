"""Gemma 4, text model. As Gemma 3, and layers without a window have other heads, whose keys may be their values; the
last layers may read another layer's keys and values; a mixture of experts may lie beside the MLP; each layer may have
embeddings of its own (`PerLayerEmbedding`); each layer's output is multiplied by a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from quire.kernels import Kernels
from quire.kernels.paging import Ends, LayerCache, Paging
from quire.layers.attention import Attention
from quire.layers.embedding import Embedding
from quire.layers.latent_attention import LatentAttention
from quire.layers.linear import Linear
from quire.layers.moe import read_experts
from quire.layers.norm import UnitNorm
from quire.layers.rotary import RotaryTable
from quire.layers.source import Part, Source
from quire.models.config import Gemma4Config, ModelConfig
from quire.models.decoder import Decoder, build_attention, build_mlp, build_norm
from quire.models.rope import rotary_table

if TYPE_CHECKING:
    from torch import Tensor


class Gemma4Layer:
    """x = x + norm(attention(norm(x))); x = x + norm(mlp(norm(x))), where experts may be added to the MLP; x = x +
    norm(project(gelu(gate(x)) * own)), with the layer's own embeddings; x = x * scale."""

    def __init__(self, config: ModelConfig, source: Source, ops: Kernels, index: int, rotary: RotaryTable) -> None:
        name, size = f"model.layers.{index}", config.hidden_size
        norm = partial(build_norm, config, source, ops, size=size)
        self.input_norm = norm(f"{name}.input_layernorm")
        self.attention: Attention | LatentAttention = build_gemma4_attention(config, source, ops, index, rotary)
        self.post_attention_norm = norm(f"{name}.post_attention_layernorm")
        self.mlp_norm = norm(f"{name}.pre_feedforward_layernorm")
        self.mlp = build_mlp(plain_layer(config, index), source, ops, index)
        self.experts = None if config.experts is None else Gemma4Experts(config, source, ops, index)
        self.output_norm = norm(f"{name}.post_feedforward_layernorm")
        self.own = OwnEmbedding(config, source, ops, index) if details(config).per_layer_size else None
        self.scale = read_number(source, f"{name}.layer_scale.weight")
        self.ops = ops

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        paging: Paging,
        cache: LayerCache,
        ends: Ends | None = None,
        *own: Tensor,
    ) -> tuple[Tensor, None]:
        x, residual = self.input_norm.add(x, residual)
        x = self.post_attention_norm(self.attention(x, positions, paging, cache, ends))
        if ends is not None:
            residual = residual[ends.tokens]
        x, residual = self.mlp_norm.add(x, residual)
        x = self.mlp(x)
        if self.experts is not None:
            x = self.experts(x, residual)
        x = self.output_norm(x)
        if self.own is not None:
            residual = self.ops.add(x, residual)
            x = self.own(residual, own[0] if ends is None else own[0][ends.tokens])
        return self.ops.add(x, residual, self.scale), None


class Gemma4Experts:
    """norm(mlp) + norm(experts(norm(x))), where x is the input of the MLP's norm. The router norms it on its own."""

    def __init__(self, config: ModelConfig, source: Source, ops: Kernels, index: int) -> None:
        assert config.experts is not None
        layer, size, self.routing = f"model.layers.{index}", config.hidden_size, config.experts.routing
        norm = partial(build_norm, config, source, ops, size=size)
        self.mlp_norm = norm(f"{layer}.post_feedforward_layernorm_1")
        self.input_norm = norm(f"{layer}.pre_feedforward_layernorm_2")
        self.output_norm = norm(f"{layer}.post_feedforward_layernorm_2")
        self.router_norm = norm(f"{layer}.mlp.router_norm")
        if self.router_norm.weight is not None:  # a survey has no weights
            self.router_norm.weight = self.router_norm.weight * size**-0.5
        self.router = Linear(source, [Part(f"{layer}.mlp.gate", self.routing.num_experts)], size)
        self.factors = source.vector([Part(f"{layer}.mlp.expert_factors.weight", self.routing.num_experts)])
        self.weights = read_experts(source, f"{layer}.mlp", size, config.experts)
        self.ops = ops

    def __call__(self, mlp: Tensor, x: Tensor) -> Tensor:
        """mlp, x [tokens, hidden_size] -> [tokens, hidden_size]"""
        routes = self.ops.route(self.router(self.router_norm(x)), None, self.routing, self.factors)
        mixed = self.ops.experts(self.input_norm(x), routes, self.weights, None, None)
        total: Tensor = self.ops.add(self.mlp_norm(mlp), self.output_norm(mixed))
        return total


class OwnEmbedding:
    """norm(project(gelu(gate(x)) * own)), where `own` is the layer's part of `PerLayerEmbedding`."""

    def __init__(self, config: ModelConfig, source: Source, ops: Kernels, index: int) -> None:
        layer, size, own_size = f"model.layers.{index}", config.hidden_size, details(config).per_layer_size
        self.gate = Linear(source, [Part(f"{layer}.per_layer_input_gate", own_size)], size)
        self.project = Linear(source, [Part(f"{layer}.per_layer_projection", size)], own_size)
        self.norm = build_norm(config, source, ops, f"{layer}.post_per_layer_input_norm", size)
        self.activation = config.activation
        self.ops = ops

    def __call__(self, x: Tensor, own: Tensor) -> Tensor:
        """x [tokens, hidden_size], own [tokens, per_layer_size] -> [tokens, hidden_size]"""
        gated = self.ops.multiply(self.ops.activate(self.gate(x), self.activation), own)
        return self.norm(self.project(gated))


class PerLayerEmbedding:
    """For each layer (norm(project(x)) + embedding(token)) / sqrt(2), of a size of its own."""

    def __init__(self, config: ModelConfig, source: Source, ops: Kernels) -> None:
        own_size, self.num_layers = details(config).per_layer_size, config.num_layers
        width = own_size * self.num_layers
        self.embedding = Embedding(
            source, "model.embed_tokens_per_layer", vocab_size=details(config).per_layer_vocab, hidden_size=width,
            scale=own_size**0.5, ranks=ops.ranks,
        )  # fmt: skip
        self.project = Linear(source, [Part("model.per_layer_model_projection", width)], config.hidden_size)
        # The projection is to be multiplied by hidden_size ** -0.5. Its norm undoes that, but for the epsilon.
        scaled = replace(config, norm_eps=config.norm_eps * config.hidden_size)
        self.norm = build_norm(scaled, source, ops, "model.per_layer_projection_norm", own_size)
        self.sizes = [own_size] * self.num_layers
        self.ops = ops

    def __call__(self, tokens: Tensor, x: Tensor) -> Sequence[Tensor]:
        """tokens [n], x [n, hidden_size], their embeddings -> [n, per_layer_size] for each layer"""
        projected = self.norm(self.project(x).view(-1, self.num_layers, self.sizes[0])).flatten(1)
        joined: Tensor = self.ops.add(projected, self.embedding(tokens), 2**-0.5)
        return joined.split_with_sizes(self.sizes, dim=1)


class Gemma4(Decoder):
    """A Decoder of Gemma4Layers, with embeddings scaled by the square root of the hidden size."""

    def __init__(self, config: ModelConfig, source: Source, ops: Kernels) -> None:
        assert config.local_rope is not None
        full, local = (rotary_table(rope, config.max_len, ops.arrays) for rope in (config.rope, config.local_rope))
        layers = [
            Gemma4Layer(config, source, ops, index, full if window is None else local)
            for index, window in enumerate(config.windows)
        ]
        super().__init__(config, source, ops, layers, embedding_scale=config.hidden_size**0.5)
        self.per_layer = PerLayerEmbedding(config, source, ops) if details(config).per_layer_size else None

    def layer_inputs(self, tokens: Tensor, x: Tensor) -> Sequence[Tensor] | None:
        return None if self.per_layer is None else self.per_layer(tokens, x)


def build_gemma4_attention(
    config: ModelConfig, source: Source, ops: Kernels, index: int, rotary: RotaryTable
) -> Attention:
    own = plain_layer(config, index)
    is_global = config.windows[index] is None
    attention = build_attention(
        own,
        source,
        ops,
        index,
        rotary,
        keys_are_values=is_global and details(config).keys_are_values,
        value_norm=UnitNorm(ops, size=own.head_dim, eps=config.norm_eps),
        shares=find_shared(config, index),
    )
    assert isinstance(attention, Attention)
    return attention


def plain_layer(config: ModelConfig, index: int) -> ModelConfig:
    """The configuration with the sizes of one layer."""
    num_kv_heads, head_dim = config.layer_heads(index)
    shares = index >= config.num_stored_layers
    size = (details(config).sharing_size if shares else 0) or config.intermediate_size
    return replace(config, num_kv_heads=num_kv_heads, head_dim=head_dim, intermediate_size=size, experts=None)


def find_shared(config: ModelConfig, index: int) -> int | None:
    """How many layers before this one the layer is whose keys and values it reads; None if it stores its own."""
    if index < config.num_stored_layers:
        return None
    kinds = [each for each in range(config.num_stored_layers) if config.windows[each] == config.windows[index]]
    return index - kinds[-1]


def details(config: ModelConfig) -> Gemma4Config:
    assert config.gemma4 is not None
    return config.gemma4


def read_number(source: Source, name: str) -> float:
    """A number that is stored as a vector of one. A survey has no numbers."""
    stored = source.vector([Part(name, 1)])
    return 1.0 if stored is None else float(stored[0])
