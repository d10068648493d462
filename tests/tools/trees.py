"""Random draft trees, as masks for the reference and as `Paging.paths`."""

from __future__ import annotations

import random

import torch


def draw_trees(counts: list[int], seed: int) -> torch.Tensor:
    """[tokens, max_query] bool: which of its row's tokens a token sees. The first token of a row is its root."""
    rng, parts = random.Random(seed), []
    widest = max(counts)
    for count in counts:
        mask = torch.zeros(count, widest, dtype=torch.bool)
        for token in range(count):
            if token:
                mask[token] = mask[rng.randrange(token)]
            mask[token, token] = True
        parts.append(mask)
    return torch.cat(parts)


def paths_of(ancestors: torch.Tensor) -> torch.Tensor:
    """The masks as [tokens, max_depth + 1] int32: each token's ancestors and itself, then -1."""
    lists = [mask.nonzero().flatten().tolist() for mask in ancestors]
    deepest = max(map(len, lists))
    padded = [path + [-1] * (deepest - len(path)) for path in lists]
    return torch.tensor(padded, dtype=torch.int32, device=ancestors.device)
