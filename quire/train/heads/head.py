"""TrainedHead: what the loop needs of a head, and parts that several kinds share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from quire.errors import UnsupportedModel
from quire.kernels import reference
from quire.layers.attention import Attention
from quire.train.features import Batch, Inputs
from quire.train.target import Target
from quire.train.vocabulary import Bigrams


class TrainedHead(Protocol):
    """A network from the target's features to the input of the output matrix. It is an `nn.Module`."""

    inputs: Inputs
    depth: int
    rates: Mapping[str, float]  # of parameters that learn faster than the others

    @property
    def bigrams(self) -> Bigrams | None: ...

    def __call__(self, batch: Batch) -> Tensor:
        """The states of each anchor's places, [dialogues, anchors, depth, hidden_size]"""
        ...

    def describe(self) -> dict[str, Any]:
        """The fields of its `config.json`."""
        ...

    def parameters(self) -> Any: ...

    def state_dict(self) -> dict[str, Tensor]: ...


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight


def table_of(rows: Tensor) -> nn.Embedding:
    """Rows that are trained."""
    made = nn.Embedding(*rows.shape)
    with torch.no_grad():
        made.weight.copy_(rows)
    return made


def linear(rows: int, cols: int, generator: torch.Generator, gain: float = 1.0) -> nn.Linear:
    """Without bias, with random weights."""
    made = nn.Linear(cols, rows, bias=False)
    with torch.no_grad():
        made.weight.normal_(0.0, gain / math.sqrt(cols), generator=generator)
    return made


class GatedMLP(nn.Module):
    def __init__(self, size: int, intermediate_size: int, generator: torch.Generator) -> None:
        super().__init__()
        self.gate_proj = linear(intermediate_size, size, generator)
        self.up_proj = linear(intermediate_size, size, generator)
        self.down_proj = linear(size, intermediate_size, generator, gain=0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def rotate(q: Tensor, positions: Tensor, table: Tensor, interleaved: bool) -> Tensor:
    """q [..., heads, head_dim], positions [...] -> q, rotated"""
    flat = q.float().flatten(0, -3)
    rotated, _ = reference.rope(flat, flat, positions.flatten(), table, interleaved)
    return rotated.view(q.shape)


def attend(
    q: Tensor, scored: list[tuple[Tensor, Tensor, Tensor]], scale: float, softcap: float | None = None
) -> Tensor:
    """q [rows, queries, heads, dim] -> [rows, queries, heads * dim], over several sets of keys at once.

    A set is keys and values and which of them a query sees, [rows, queries, keys] bool. Keys are [rows, keys, kv_heads,
    dim], or [rows, queries, 1, kv_heads, dim] where each query has one of its own.
    """
    if q.is_cuda and len(scored) == 1 and softcap is None:
        return attend_fused(q, *scored[0], scale)
    kv_heads = scored[0][0].shape[-2]
    rows, num_queries, heads, dim = q.shape
    grouped = q.float().view(rows, num_queries, kv_heads, heads // kv_heads, dim)
    scores = []
    for k, _, visible in scored:
        pattern = "bqkgd,bqmkd->bkgqm" if k.dim() == 5 else "bqkgd,bmkd->bkgqm"
        products = torch.einsum(pattern, grouped, k.float()) * scale
        if softcap is not None:
            products = softcap * torch.tanh(products / softcap)
        scores.append(products.masked_fill(~visible[:, None, None], -torch.inf))
    weights = torch.cat(scores, dim=-1).softmax(-1)
    parts = torch.split(weights, [each.shape[-1] for each in scores], dim=-1)
    out = q.new_zeros(grouped.shape, dtype=torch.float32)
    for each, (k, v, _) in zip(parts, scored, strict=True):
        pattern = "bkgqm,bqmkd->bqkgd" if k.dim() == 5 else "bkgqm,bmkd->bqkgd"
        out = out + torch.einsum(pattern, each, v.float())
    return out.flatten(2)


def attend_fused(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """`attend` for one set of keys, in torch's own kernel, which keeps no scores. Every query sees a key.

    Not cuDNN's kernel: it is compiled for each new shape, and nearly every batch has one.
    """
    repeats = q.shape[2] // k.shape[2]
    q, k, v = (x.to(torch.bfloat16).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        out = functional.scaled_dot_product_attention(q, k, v, seen[:, None], scale=scale)
    return out.transpose(1, 2).flatten(2).float()


def spread_layers(target: Target, shares: tuple[float, ...]) -> tuple[int, ...]:
    """Different layers at about these shares of the depth, ascending. The model has at least as many."""
    count = target.config.num_layers
    layers = [min(count - 1, int(share * count)) for share in shares]
    for index in range(len(layers) - 2, -1, -1):  # from the last one down: each is before the next
        layers[index] = min(layers[index], layers[index + 1] - 1)
    for index in range(len(layers)):
        layers[index] = max(layers[index], index)
    assert layers == sorted(set(layers)), layers
    assert layers[-1] < count, layers
    return tuple(layers)


def attention_of(target: Target, layer: int) -> Attention:
    attention = target.model.layers[layer].attention
    if not isinstance(attention, Attention):
        raise UnsupportedModel("This head reads keys and values of its target, and this one has latents instead.")
    return attention


def state_scale(target: Target, layer: int, text: Sequence[int]) -> float:
    """The usual size of states after a layer: a root mean square. It differs much between layers and models."""
    (states,) = target.text_states((layer,), len(text)).compute([text])
    squares = target.as_tensor(states.taps[0]).float().square().mean(-1)
    return max(1e-3, float(squares.median().sqrt()))


def mean_scale(target: Target) -> float:
    """The usual size of the target's final states: the root mean square of the last norm's weight."""
    return float(target.as_tensor(target.model.norm.weight).float().square().mean().sqrt())
