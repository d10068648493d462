"""The op `experts`: chooses the kernels by the number of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cuda.experts.one_token import experts_of_one
from quire.kernels.cuda.experts.pairs import sort_pairs
from quire.kernels.cuda.experts.tiles import Pairs, Tile, add_outputs, down, gate_up
from quire.kernels.routing import ExpertWeights

FEW_TOKENS = 64  # up to these, each expert's pairs fit in one tile, and programs find their pairs themselves
MIN_ROWS = 16  # columns of a tile


def experts(
    x: Tensor,
    routes: tuple[Tensor, Tensor],
    weights: ExpertWeights,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    *,
    exact: bool = False,
) -> Tensor:
    """As in the reference. `exact`: the same bits for a token in any batch."""
    if not len(x):
        return x
    if len(x) == 1 and not exact:
        return experts_of_one(x, routes, weights, shared, shared_gate)
    ids, factors = routes
    num_tokens = len(x)
    pairs = Pairs(ids, weights.num_experts)
    if num_tokens > FEW_TOKENS:
        pairs = Pairs(ids, weights.num_experts, *sort_pairs(ids, weights.num_experts))
    inner = gate_up(x, pairs, weights, choose_gate_up(num_tokens, pairs, x.dtype), exact=exact)
    outputs = down(inner, pairs, weights, choose_down(num_tokens, pairs, x.dtype), exact=exact)
    return add_outputs(outputs, factors, shared, shared_gate, exact=exact)


def choose_rows(num_tokens: int, pairs: Pairs) -> int:
    """The pairs of a tile: enough for all of an expert, or for twice the mean."""
    if pairs.counts is None:
        rows = MIN_ROWS
        while rows < num_tokens:
            rows *= 2
        return rows
    mean = pairs.ids.numel() / pairs.num_experts
    return 32 if mean <= 16 else 64 if mean <= 64 else 128


def choose_gate_up(num_tokens: int, pairs: Pairs, dtype: torch.dtype) -> Tile:
    """Measured on an H200: within 5% of the fastest tile from 4 to 8,192 tokens."""
    rows = choose_rows(num_tokens, pairs)
    if dtype == torch.float32:
        return Tile(rows if pairs.counts is None else min(rows, 32), 64, 32, 4, 2)
    if rows <= 16:
        return Tile(rows, 64, 128, 4, 3)
    return Tile(rows, 64, 64, 4, 4) if rows <= 64 else Tile(rows, 128, 64, 8, 3)


def choose_down(num_tokens: int, pairs: Pairs, dtype: torch.dtype) -> Tile:
    tile = choose_gate_up(num_tokens, pairs, dtype)
    return tile._replace(outputs=128, stages=3) if tile.rows == 64 and dtype != torch.float32 else tile
