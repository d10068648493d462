"""Decoder: what all families share. Tokens are embedded and pass through the layers, a norm and the head.

A family is a Decoder with its own layers. `build_attention`, `build_mlp` and `build_norm` make the modules of a layer
from the configuration. The engine runs a Decoder and holds the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from quire.kernels import Kernels
from quire.kernels.cache_spec import CacheSpec
from quire.kernels.paging import Ends, LayerCache, Paging
from quire.kernels.shares import own_outputs
from quire.kernels.taps import Taps
from quire.layers.attention import Attention
from quire.layers.embedding import Embedding, Head
from quire.layers.latent_attention import LatentAttention
from quire.layers.mlp import MLP, GatedMLP
from quire.layers.moe import Experts
from quire.layers.norm import LayerNorm, Norm, RMSNorm
from quire.layers.rotary import RotaryTable
from quire.layers.source import Part, Source
from quire.models.config import ModelConfig
from quire.quant.affine import AffineWeight

if TYPE_CHECKING:
    from torch import Tensor


class Layer(Protocol):
    attention: Attention | LatentAttention

    def __call__(self, *arguments: Any, **options: Any) -> tuple[Any, Any]:
        """(x, residual, positions, paging, cache, ends, *own) -> the next x and residual, [tokens, hidden_size] each.
        The hidden state is their sum.

        Norms compute the sum. Both arguments may be overwritten. The first layer gets no residual, and a layer may
        return none. With `ends`, the outputs have only the rows of those tokens. `own` are `Decoder.layer_inputs`.
        """
        ...


class Decoder:
    """Layers between an embedding and a head."""

    def __init__(
        self,
        config: ModelConfig,
        source: Source,
        ops: Kernels,
        layers: Sequence[Layer],
        *,
        embedding_scale: float | None = None,
    ) -> None:
        vocab, size = config.vocab_size, config.hidden_size
        self.embedding = Embedding(
            source,
            "model.embed_tokens",
            vocab_size=vocab,
            hidden_size=size,
            scale=embedding_scale,
            multiplier=config.embedding_multiplier,
            ranks=ops.ranks,
        )
        self.layers = layers
        self.norm = build_norm(config, source, ops, "model.norm", size)
        tied = config.tie_embeddings
        own = own_outputs(vocab, ops.ranks)
        head = self.embedding.weight if tied else source.matrix([Part("lm_head.weight", vocab).only(own)], size)
        if ops.ranks is not None:
            head = ops.ranks.head(head, own, vocab)
        scale, has_bias = config.structure.logit_scale, config.structure.head_bias
        if scale is not None or has_bias:
            bias = source.vector([Part("lm_head.bias", vocab)]) if has_bias else None
            head = AffineWeight(head, scale=scale, bias=bias)
        self.head = Head(head, ops, softcap=config.logit_softcap)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The input of the first layer, [n, hidden_size]. A family may add positions, or norm it."""
        return self.embedding(tokens)

    def layer_inputs(self, tokens: Tensor, x: Tensor) -> Sequence[Tensor] | None:
        """What each layer gets beside the hidden state, if a family has such inputs; x is the first layer's input."""
        return None

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        paging: Paging,
        kv: Sequence[LayerCache],
        ends: Ends | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        """tokens [n] int64, positions [n] int64, a cache a layer -> hidden [n, hidden_size], after the last norm.

        With `ends`, hidden of those tokens only, [rows, hidden_size]. The last layer skips the other tokens.
        `taps` keeps the hidden states after its layers.
        """
        assert len(kv) == len(self.layers)
        x = self.embed(tokens, positions)
        inputs = self.layer_inputs(tokens, x)
        x, residual = self.run_layers(range(len(kv)), x, positions, paging, kv, ends, taps, inputs)
        return self.norm.add(x, residual)[0]

    def run_layers(
        self,
        layers: range,
        x: Tensor,
        positions: Tensor,
        paging: Paging,
        kv: Sequence[LayerCache],
        ends: Ends | None = None,
        taps: Taps | None = None,
        inputs: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Some of the layers. x [n, hidden_size] is the hidden state before them. Returns the next x and residual."""
        residual: Tensor | None = None
        last = len(self.layers) - 1
        for index in layers:
            own = () if inputs is None else (inputs[index],)
            x, residual = self.layers[index](
                x, residual, positions, paging, kv[index], ends if index == last else None, *own
            )  # fmt: skip
            if taps is not None and index in taps.layers:
                taps.keep(x, residual)
        return x, residual

    def cache_specs(self) -> list[CacheSpec]:
        """The cache spec of each layer. The model is called with one cache a layer, in this order."""
        return [layer.attention.cache_spec for layer in self.layers]


def build_attention(
    config: ModelConfig,
    source: Source,
    ops: Kernels,
    index: int,
    rotary: RotaryTable | None,
    **options: Any,
) -> Attention | LatentAttention:
    """Layer `index`'s attention, under its usual name. `options` are more arguments of `Attention`."""
    name = f"model.layers.{index}.self_attn"
    if config.latent is not None:
        assert rotary is not None
        return LatentAttention(
            source,
            ops,
            name,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            config=config.latent,
            scale=config.scale,
            eps=config.norm_eps,
            rotary=rotary,
            bias=config.output_bias,
        )
    norms, is_wide = None, config.structure.qk_norm == "whole"
    if config.structure.qk_norm is not None:
        norm = partial(build_norm, config, source, ops)
        widths = [heads if is_wide else 1 for heads in (config.num_heads, config.num_kv_heads)]
        q, k = (
            partial(norm, f"{name}.{each}_norm", width * config.head_dim)
            for each, width in zip("qk", widths, strict=True)
        )
        norms = q(), None if options.get("shares") else k()
    return Attention(
        source,
        ops,
        name,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.scale,
        rotary=rotary,
        window=config.windows[index],
        softcap=config.attention_softcap,
        bias=config.attention_bias,
        output_bias=config.output_bias,
        qk_norm=norms,
        wide_norm=is_wide,
        sinks=config.attention_sinks,
        **options,
    )


def build_mlp(config: ModelConfig, source: Source, ops: Kernels, index: int) -> GatedMLP | MLP | Experts:
    """Layer `index`'s MLP or mixture of experts, under its usual name."""
    if config.experts is not None and config.experts.layers[index]:
        name = f"model.layers.{index}.mlp"
        return Experts(source, ops, name, hidden_size=config.hidden_size, config=config.experts)
    structure = config.structure
    wiring: dict[str, Any] = {"fused": structure.fused_gate_up}
    if not structure.gated:
        wiring = {"transposed": structure.transposed}
    build: Any = GatedMLP if structure.gated else MLP
    mlp: GatedMLP | MLP = build(
        source,
        ops,
        f"model.layers.{index}.mlp",
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        activation=config.activation,
        bias=config.mlp_bias,
        **wiring,
    )
    return mlp


def build_norm(config: ModelConfig, source: Source, ops: Kernels, name: str, size: int) -> Norm:
    if config.structure.norm == "layer":
        return LayerNorm(source, ops, name, size=size, eps=config.norm_eps, has_bias=config.structure.norm_bias)
    return RMSNorm(source, ops, name, size=size, eps=config.norm_eps, offset=config.norm_offset)
