"""The ops of a mixture of experts in plain torch: `route` chooses experts, `experts` computes them. Part of
`reference.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels.routing import ExpertWeights, Routing

SILU_FACTOR = 1.702  # of gpt-oss's gate


def route(
    logits: Tensor, bias: Tensor | None, routing: Routing, factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """logits [tokens, experts], bias [experts] -> ids [tokens, top_k] int64, weights [tokens, top_k] float32.

    The best expert comes first. The bias is added to the scores for the choice only, not for the weights. `factors`
    [experts] float32 multiply the weights last.
    """
    wide = logits.float()
    scores = wide.softmax(-1) if routing.scoring == "softmax" else wide.sigmoid()
    choice = scores if bias is None else scores + bias.float()
    if routing.num_groups > 1:
        choice = choice.masked_fill(~in_top_groups(choice, routing), -torch.inf)
    ids = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(1, ids)
    if routing.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * routing.factor
    return ids, weights if factors is None else weights * factors[ids]


def in_top_groups(choice: Tensor, routing: Routing) -> Tensor:
    """choice [tokens, experts] -> whether each expert's group is one of the best, [tokens, experts] bool."""
    grouped = choice.view(len(choice), routing.num_groups, -1)
    group_scores = grouped.topk(routing.group_scores, dim=-1).values.sum(-1)
    best = torch.sort(group_scores, dim=-1, descending=True, stable=True).indices[:, : routing.top_groups]
    kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, best, True)
    return kept.unsqueeze(-1).expand_as(grouped).flatten(1)


def experts(
    x: Tensor,
    routes: tuple[Tensor, Tensor],
    weights: ExpertWeights,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """x [tokens, hidden_size] -> the weighted outputs of each token's experts, [tokens, hidden_size].

    They are summed in the order of `routes`, after `shared` [tokens, hidden_size], the output of an expert that all
    tokens have, times sigmoid(shared_gate [tokens, 1]) if it has a gate.
    """
    ids, factors = routes
    outputs = x.new_zeros(*ids.shape, x.shape[1])
    for expert in sorted(set(ids.flatten().tolist())):
        tokens, ranks = (ids == expert).nonzero(as_tuple=True)
        outputs[tokens, ranks] = run_expert(x[tokens], weights, expert)
    total = torch.zeros_like(x, dtype=torch.float32)
    if shared is not None:
        total = shared.float() if shared_gate is None else shared.float() * shared_gate.float().sigmoid()
    for rank in range(ids.shape[1]):
        total = total + outputs[:, rank].float() * factors[:, rank, None]
    return total.to(x.dtype)


def run_expert(x: Tensor, weights: ExpertWeights, expert: int) -> Tensor:
    """x [n, hidden_size] -> [n, hidden_size], of one expert."""
    gate_up = functional.linear(x, *rows_of(weights.gate_up, weights.gate_up_bias, expert, 2 * weights.size))
    inner = gate(gate_up, weights)
    return functional.linear(inner, *rows_of(weights.down, weights.down_bias, expert, weights.hidden_size))


def rows_of(weight: Any, bias: Tensor | None, expert: int, count: int) -> tuple[Tensor, Tensor | None]:
    """An expert's matrix, dense, and its bias."""
    rows = slice(expert * count, (expert + 1) * count)
    matrix = weight.rows(torch.arange(rows.start, rows.stop)) if weight.data is None else weight.data[rows]
    return matrix, None if bias is None else bias[rows]


def gate(gate_up: Tensor, weights: ExpertWeights) -> Tensor:
    """gate_up [n, 2 * size] -> [n, size]"""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if weights.activation == "clamped_silu":
        gate, up = gate.clamp(max=weights.limit), up.clamp(-weights.limit, weights.limit) + 1
        activated = gate * torch.sigmoid(SILU_FACTOR * gate)
    elif weights.activation == "silu":
        activated = functional.silu(gate)
    else:
        activated = functional.gelu(gate, approximate="tanh")
    return (activated * up).to(gate_up.dtype)
