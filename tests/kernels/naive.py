"""Attention one query, one head and one key at a time, in float64 and without a cache: what paged kernels must give."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Query:
    """One query token: its position, and the (position, index) of each key it may see before a window is applied."""

    position: int
    keys: list[tuple[int, int]]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query: Query,
    *,
    scale: float,
    window: int | None = None,
    slopes: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """q [heads, dim] of one token, k and v [keys, kv_heads, dim] -> [heads, dim] float64"""
    shared = q.shape[0] // k.shape[1]
    keys = [(at, i) for at, i in query.keys if window is None or query.position - at < window]
    out = torch.zeros(q.shape[0], v.shape[-1], dtype=torch.float64)
    for head in range(q.shape[0]):
        weights = []
        for at, index in keys:
            score = float(q[head].double() @ k[index, head // shared].double()) * scale
            if softcap is not None:
                score = softcap * math.tanh(score / softcap)
            if slopes is not None:
                score += float(slopes[head]) * (at - query.position)
            weights.append(math.exp(score))
        for weight, (_, index) in zip(weights, keys, strict=True):
            out[head] += weight / sum(weights) * v[index, head // shared].double()
    return out


def causal(context: int, count: int) -> list[Query]:
    return [Query(p, [(i, i) for i in range(p + 1)]) for p in range(context, context + count)]


def tree(context: int, parents: list[int | None]) -> list[Query]:
    """Queries of a tree of tokens, each with its parent's index or None for the context's last token."""
    past = [(i, i) for i in range(context)]
    queries = []
    for token in range(len(parents)):
        path, step = [], token
        while step is not None:
            path.insert(0, step)
            step = parents[step]
        own = [(context + depth, context + step) for depth, step in enumerate(path)]
        queries.append(Query(context + len(path) - 1, past + own))
    return queries
