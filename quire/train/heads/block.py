"""BlockModule: the block head in torch. `models/block_head.py` is the one that the engine runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quire.models.block_head import NUM_INPUTS
from quire.train.features import Batch, Inputs
from quire.train.heads.head import (
    GatedMLP,
    Norm,
    attend,
    attention_of,
    linear,
    mean_scale,
    rotate,
    spread_layers,
    table_of,
)
from quire.train.settings import RANK
from quire.train.target import Target
from quire.train.vocabulary import Bigrams

TAP_SHARES = (0.35, 0.7)
FLATTEN = 0.3  # of the first logits: at first they are those of another place
KV_SHARES = {1: (0.7,), 2: (0.5, 0.9)}  # by the number of layers


class BlockAttention(nn.Module):
    """To the keys and values of a layer of the target."""

    def __init__(self, target: Target, layer: int, size: int, generator: torch.Generator) -> None:
        super().__init__()
        self.target = attention_of(target, layer)
        self.heads, self.dim = self.target.heads[0], self.target.head_dim
        self.q_proj = linear(self.heads * self.dim, size, generator)
        self.o_proj = linear(size, self.heads * self.dim, generator, gain=0.1)
        rotary = self.target.rotary
        self.table = None if rotary is None else target.as_tensor(rotary.table)
        self.is_interleaved = rotary is not None and rotary.interleaved

    def forward(self, x: Tensor, batch: Batch, index: int) -> Tensor:
        """x [dialogues, anchors, places, size] -> the same shape"""
        rows, num_anchors, depth, _ = x.shape
        q = self.q_proj(x).view(rows, num_anchors, depth, self.heads, self.dim)
        if self.table is not None:
            positions = batch.anchors[..., None] + torch.arange(depth, device=x.device)
            positions = positions.clamp(max=len(self.table) - 1)
            q = rotate(q, positions, self.table, self.is_interleaved)
        seen = see(batch, self.target.window).repeat_interleave(depth, dim=1)
        keys, values = batch.keys[index], batch.values[index]
        out = attend(q.flatten(1, 2), [(keys, values, seen)], self.target.scale, self.target.softcap)
        result: Tensor = self.o_proj(out)
        return result.view(x.shape)


def see(batch: Batch, window: int | None) -> Tensor:
    """[dialogues, anchors, tokens]: the tokens before the anchor. A window is one shorter, as for the engine's head."""
    anchors, positions = batch.anchors[..., None], torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    seen = positions < anchors
    return seen if window is None else seen & (positions > anchors - window)


class BlockLayer(nn.Module):
    def __init__(self, target: Target, layer: int, size: int, generator: torch.Generator) -> None:
        super().__init__()
        eps = target.config.norm_eps
        self.input_layernorm = Norm(torch.ones(size), eps)
        self.self_attn = BlockAttention(target, layer, size, generator)
        self.post_attention_layernorm = Norm(torch.ones(size), eps)
        self.mlp = GatedMLP(size, target.config.intermediate_size, generator)

    def forward(self, x: Tensor, batch: Batch, index: int) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), batch, index)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class BlockModule(nn.Module):
    """All places of an anchor in one pass. It starts as the target's final state, which predicts the token before."""

    rates: ClassVar[Mapping[str, float]] = {}

    def __init__(self, target: Target, depth: int, num_layers: int, num_ids: int, generator: torch.Generator) -> None:
        super().__init__()
        size, eps = target.hidden_size, target.config.norm_eps
        self.depth = depth
        self.inputs = Inputs(spread_layers(target, TAP_SHARES), find_kv_layers(target, num_layers))
        self.intermediate_size = target.config.intermediate_size
        self.eps = eps
        self.norms = nn.ModuleList(Norm(torch.ones(size), eps) for _ in range(NUM_INPUTS))
        self.in_proj = linear(size, NUM_INPUTS * size, generator, gain=0.5)
        self.slots = table_of(0.3 * torch.randn(depth, size, generator=generator))
        self.layers = nn.ModuleList(BlockLayer(target, layer, size, generator) for layer in self.inputs.kv_layers)
        self.norm = Norm(torch.full((size,), FLATTEN * mean_scale(target)), eps)
        rank = RANK
        self.bigram_in = table_of(torch.randn(num_ids, rank, generator=generator) / rank**0.5)
        self.bigram_out = table_of(torch.zeros(num_ids, rank))
        with torch.no_grad():
            self.in_proj.weight[:, 2 * size : 3 * size] += torch.eye(size)

    @property
    def bigrams(self) -> Bigrams:
        return Bigrams(self.bigram_in.weight, self.bigram_out.weight)

    def forward(self, batch: Batch) -> Tensor:
        taps = batch.at_anchors(batch.taps, -1)
        inputs = [taps[:, :, 0], taps[:, :, 1], batch.at_anchors(batch.hidden, -1), batch.at_anchors(batch.embedded)]
        normed = [norm(x) for norm, x in zip(self.norms, inputs, strict=True)]
        x = self.in_proj(torch.cat(normed, dim=-1))[:, :, None] + self.slots.weight
        for index, layer in enumerate(self.layers):
            x = layer(x, batch, index)
        out: Tensor = self.norm(x)
        return out

    def describe(self) -> dict[str, Any]:
        return {
            "tap_layers": list(self.inputs.taps),
            "kv_layers": list(self.inputs.kv_layers),
            "depth": self.depth,
            "intermediate_size": self.intermediate_size,
            "rms_norm_eps": self.eps,
            "bigram_rank": self.bigram_in.weight.shape[1],
        }


def find_kv_layers(target: Target, count: int) -> tuple[int, ...]:
    """The layers nearest to their share of the depth, those without a window first: they see all of a request."""
    windows = target.config.windows
    whole = [layer for layer, window in enumerate(windows) if window is None]
    layers = whole if len(whole) >= count else list(range(len(windows)))
    picked = {layers[min(len(layers) - 1, int(share * len(layers)))] for share in KV_SHARES[count]}
    return tuple(sorted(picked))
