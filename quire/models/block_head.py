"""BlockHead: drafts all next tokens of a request in one pass, from the target's hidden states and its KV cache.

It has no cache of its own. Its layers attend to the keys and values of the target's layers. `engine/block_head.py` runs
it, `weights/heads.py` loads it, and `quire train-draft` makes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.errors import UnsupportedModel
from quire.kernels import Kernels
from quire.kernels.paging import LayerCache
from quire.layers.attention import Attention
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.source import Part, Source
from quire.models.decoder import Decoder

NUM_INPUTS = 4  # two taps, the final hidden state, and the last token's embedding


@dataclass(frozen=True, slots=True)
class BlockHeadConfig:
    """`tap_layers` and `kv_layers` are layers of the target: those whose hidden states are read, and whose keys are."""

    depth: int
    tap_layers: tuple[int, ...]
    kv_layers: tuple[int, ...]
    intermediate_size: int
    norm_eps: float


class BlockLayer:
    """x = x + attention(norm(x)) over the target's keys; x = x + mlp(norm(x))."""

    def __init__(
        self, config: BlockHeadConfig, source: Source, ops: Kernels, index: int, target: Attention, hidden_size: int
    ) -> None:
        name, eps, width = f"layers.{index}", config.norm_eps, target.heads[0] * target.head_dim
        self.input_norm = RMSNorm(source, ops, f"{name}.input_layernorm", size=hidden_size, eps=eps)
        self.q_proj = Linear(source, [Part(f"{name}.self_attn.q_proj", width)], hidden_size)
        self.o_proj = Linear(source, [Part(f"{name}.self_attn.o_proj", hidden_size)], width)
        self.mlp_norm = RMSNorm(source, ops, f"{name}.post_attention_layernorm", size=hidden_size, eps=eps)
        self.mlp = GatedMLP(
            source, ops, f"{name}.mlp", hidden_size=hidden_size, intermediate_size=config.intermediate_size
        )
        self.target = target
        self.ops = ops

    def __call__(self, x: Any, residual: Any, positions: Any, paging: Any, cache: LayerCache) -> tuple[Any, Any]:
        x, residual = self.input_norm.add(x, residual)
        x = self.o_proj(self._attend(x, positions, paging, cache))
        x, residual = self.mlp_norm.add(x, residual)
        return self.mlp(x), residual

    def _attend(self, x: Any, positions: Any, paging: Any, cache: LayerCache) -> Any:
        """Each query sees all computed tokens of its request. It is not one of them, so a window is one shorter."""
        target, num_heads = self.target, self.target.heads[0]
        q = self.q_proj(x).view(-1, num_heads, target.head_dim)
        if target.rotary is not None:
            first, second = q.split_with_sizes([num_heads - num_heads // 2, num_heads // 2], dim=1)
            self.ops.rope(first, second, positions, target.rotary.table, target.rotary.interleaved)  # in place
        window = None if target.window is None else target.window - 1
        options = {"scale": target.scale, "window": window, "softcap": target.softcap, "slopes": target.slopes}
        return self.ops.attention(q, cache, paging, **options).flatten(1)


class BlockHead:
    """The matrices of the head. The output matrix is the target's."""

    def __init__(self, config: BlockHeadConfig, source: Source, ops: Kernels, target: Decoder) -> None:
        size = target.embedding.weight.shape[1]
        self.config = config
        self.norms = [source.vector([Part(f"norms.{index}.weight", size)]) for index in range(NUM_INPUTS)]
        self.in_proj = source.matrix([Part("in_proj.weight", size)], NUM_INPUTS * size)
        attentions = [plain_attention(target, layer) for layer in config.kv_layers]
        self.layers = [
            BlockLayer(config, source, ops, index, attention, size) for index, attention in enumerate(attentions)
        ]
        self.norm = RMSNorm(source, ops, "norm", size=size, eps=config.norm_eps)

    def __call__(self, x: Any, positions: Any, paging: Any, kv: list[LayerCache]) -> Any:
        """x [queries, hidden_size], a cache a layer -> [queries, hidden_size], after the last norm."""
        residual = None
        for layer, cache in zip(self.layers, kv, strict=True):
            x, residual = layer(x, residual, positions, paging, cache)
        return self.norm.add(x, residual)[0]


def plain_attention(target: Decoder, layer: int) -> Attention:
    attention = target.layers[layer].attention
    if not isinstance(attention, Attention):
        raise UnsupportedModel("A block head reads keys and values of a target, and this one has latents instead.")
    return attention
