"""EagleModule: an autoregressive head, one layer on the target's states and the next token's embedding.

It is trained as it is used: after the first step its own outputs take the place of the target's states. All anchors are
computed together, step by step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quire.layers import mlp as layers
from quire.layers.rotary import plain_frequencies
from quire.train.features import Batch, Inputs
from quire.train.heads.head import GatedMLP, Norm, attend, linear, rotate, spread_layers, state_scale
from quire.train.target import Target

TAP_SHARES = (0.1, 0.5, 0.9)
FLATTEN = 0.3  # of the first logits: at first they are those of another token
MAX_TEXT = 4096  # tokens of a dialogue in training


class EagleAttention(nn.Module):
    def __init__(self, target: Target, generator: torch.Generator) -> None:
        super().__init__()
        config, size = target.config, target.hidden_size
        self.heads, self.kv_heads, self.dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.q_proj = linear(self.heads * self.dim, 2 * size, generator)
        self.k_proj = linear(self.kv_heads * self.dim, 2 * size, generator)
        self.v_proj = linear(self.kv_heads * self.dim, 2 * size, generator)
        self.o_proj = linear(size, self.heads * self.dim, generator, gain=0.1)
        self.register_buffer("table", make_table(MAX_TEXT, self.dim, config.rope.theta), persistent=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [dialogues, tokens, 2 * size] -> q, k and v [dialogues, tokens, heads, dim], rotated"""
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        q = self.q_proj(x).view(*x.shape[:2], self.heads, self.dim)
        k = self.k_proj(x).view(*x.shape[:2], self.kv_heads, self.dim)
        v = self.v_proj(x).view(*x.shape[:2], self.kv_heads, self.dim)
        table: Any = self.table
        return rotate(q, positions, table, False), rotate(k, positions, table, False), v


def make_table(max_len: int, dim: int, theta: float) -> Tensor:
    """Cosines, then sines, [max_len, dim]"""
    angles = torch.outer(torch.arange(max_len), torch.from_numpy(plain_frequencies(dim, theta))).double()
    return torch.cat([angles.cos(), angles.sin()], dim=1).float()


class EagleLayer(nn.Module):
    """x = [input_layernorm(embedding of the next token); hidden_norm(g)]; the residual is g."""

    def __init__(self, target: Target, generator: torch.Generator) -> None:
        super().__init__()
        size, eps = target.hidden_size, target.config.norm_eps
        self.input_layernorm = Norm(torch.ones(size), eps)
        self.hidden_norm = Norm(torch.ones(size), eps)
        self.self_attn = EagleAttention(target, generator)
        self.post_attention_layernorm = Norm(torch.ones(size), eps)
        self.mlp = GatedMLP(size, target.config.intermediate_size, generator)


class EagleModule(nn.Module):
    """Row i has the state of token i and the embedding of token i + 1, and predicts token i + 2."""

    bigrams = None
    rates: ClassVar[Mapping[str, float]] = {}

    def __init__(self, target: Target, depth: int, generator: torch.Generator, text: Sequence[int]) -> None:
        """`text` is any text of the target's, to see how large its states are."""
        super().__init__()
        config, size = target.config, target.hidden_size
        self.depth = depth
        self.inputs = Inputs(spread_layers(target, TAP_SHARES))
        self.config = config
        self.window = find_window(config.windows)
        self.fc = linear(size, 3 * size, generator, gain=0.1)
        self.midlayer = EagleLayer(target, generator)
        last_norm = target.as_tensor(target.model.norm.weight).float().cpu()
        self.norm = Norm(FLATTEN * last_norm, config.norm_eps)
        scale = state_scale(target, self.inputs.taps[-1], text)
        with torch.no_grad():
            self.fc.weight /= scale
            self.fc.weight[:, 2 * size :] += torch.eye(size) / scale
            copy_layer(target, self.midlayer, scale)

    def forward(self, batch: Batch) -> Tensor:
        """Step s of an anchor n is row n - 1 + s: its state is the output of step s - 1 of the row before it."""
        layer, attention = self.midlayer, self.midlayer.self_attn
        following = batch.embedded.roll(-1, 1)  # the last row's is wrong, and no anchor's
        embedded = layer.input_layernorm(following)
        g = self.fc(batch.taps.flatten(2)).float()  # the residual stream is never rounded
        pasts: list[tuple[Tensor, Tensor]] = []
        states = []
        for step in range(self.depth):
            q, k, v = attention.project(torch.cat([embedded, layer.hidden_norm(g)], dim=-1))
            pasts.append((k, v))
            x = g + attention.o_proj(attend(q, find_keys(pasts, self.window), attention.dim**-0.5))
            out = x + layer.mlp(layer.post_attention_layernorm(x))
            last = batch.tokens.shape[1] - 1
            states.append(take_rows(self.norm(out), (batch.anchors - 1 + step).clamp(max=last)))
            g = out.roll(1, 1)
        return torch.stack(states, dim=2)

    def describe(self) -> dict[str, Any]:
        config = self.config
        return {
            "tap_layers": list(self.inputs.taps),
            "depth": self.depth,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope.theta,
            "num_training_steps": self.depth,
        }


def copy_layer(target: Target, to: EagleLayer, scale: float) -> None:
    """Start as the target's last layer, as far as the two are alike. The embedding's half of the input stays random.
    The residual stream is that of the target, divided by `scale`: states of any model then learn at one rate."""
    layer: Any = target.model.layers[-1]
    attention, size = layer.attention, target.hidden_size
    if layer.input_norm is None:
        return
    qkv = target.as_tensor(attention.qkv.weight.dense()).float().cpu()
    q, k, v = torch.split(qkv, [heads * attention.head_dim for heads in attention.heads])
    to.hidden_norm.weight.copy_(target.as_tensor(layer.input_norm.weight).float())
    to.self_attn.v_proj.weight[:, size:] = v
    to.self_attn.o_proj.weight.copy_(target.as_tensor(attention.output.weight.dense()).float() / scale)
    rotary = attention.rotary
    if attention.qk_norm is None and rotary is not None and rotary.table.shape[1] == attention.head_dim:
        to.self_attn.q_proj.weight[:, size:] = split_pairs(q, attention.head_dim) if rotary.interleaved else q
        to.self_attn.k_proj.weight[:, size:] = split_pairs(k, attention.head_dim) if rotary.interleaved else k
    if isinstance(layer.mlp, layers.GatedMLP) and layer.mlp.activation == "silu" and layer.mlp_norm is not None:
        gate, up = target.as_tensor(layer.mlp.gate_up.weight.dense()).float().cpu().chunk(2)
        to.mlp.gate_proj.weight.copy_(gate)
        to.mlp.up_proj.weight.copy_(up)
        to.mlp.down_proj.weight.copy_(target.as_tensor(layer.mlp.down.weight.dense()).float() / scale)
        to.post_attention_layernorm.weight.copy_(target.as_tensor(layer.mlp_norm.weight).float())


def split_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of heads whose pairs (2i, 2i + 1) are rotated -> the same with pairs (i, i + head_dim / 2)."""
    heads = weight.view(-1, head_dim // 2, 2, weight.shape[1])
    return heads.transpose(1, 2).reshape(weight.shape)


def find_window(windows: tuple[int | None, ...]) -> int | None:
    """The engine's head sees as far as the layer of the target that sees farthest."""
    widest = [window for window in windows if window is not None]
    return max(widest) if len(widest) == len(windows) else None


def find_keys(pasts: list[tuple[Tensor, Tensor]], window: int | None) -> list[tuple[Tensor, Tensor, Tensor]]:
    """What a row p of step s sees: rows up to p - s of step 0, and of each later step r only the row p - s + r. With a
    window nothing before p - window + 1."""
    (k, v), last = pasts[0], len(pasts) - 1
    rows, length = k.shape[:2]
    positions = torch.arange(length, device=k.device)
    ends = (positions - last).clamp(min=0)[:, None]
    seen = positions <= ends
    if window is not None:
        seen = seen & (positions > positions[:, None] - window)
    found = [(k, v, seen.expand(rows, length, length))]
    for step in range(1, len(pasts)):
        its_k, its_v = (x.roll(last - step, 1)[:, :, None] for x in pasts[step])
        is_near = window is None or last - step < window
        found.append((its_k, its_v, torch.full((rows, length, 1), is_near, device=k.device)))
    return found


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    return x[torch.arange(len(x), device=x.device)[:, None], index]
