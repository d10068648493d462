"""Draft trees for tests of attention: random parents, as `Drafts` has them, and the paths of a step on tensors."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

import torch

from quire.kernels.paging import tree_paths

Parents = list[int]


def draw_parents(num_nodes: int, rng: random.Random) -> Parents:
    """A random tree: narrow and deep, or wide and flat, or in between."""
    reach = rng.choice([1, 2, 4, num_nodes + 1])
    return [rng.randint(max(-1, node - reach), node - 1) for node in range(num_nodes)]


def path_of(parents: Parents, token: int) -> list[int]:
    """The tokens from the root, which is token 0, to `token`."""
    path = [token]
    while path[0] > 0:
        path.insert(0, parents[path[0] - 1] + 1)
    return path


def paths_of(counts: Sequence[int], parents: Sequence[Parents | None]) -> torch.Tensor:
    """`Paging.paths` of a step whose rows have that many tokens."""
    return torch.from_numpy(tree_paths([0, *accumulate(counts)], parents))


def draw_paths(counts: Sequence[int], seed: int) -> torch.Tensor:
    """`Paging.paths` of a step in which every other row of several tokens is a tree."""
    rng = random.Random(seed)
    parents = [draw_parents(count - 1, rng) if count > 1 and nth % 2 == 0 else None for nth, count in enumerate(counts)]
    return paths_of(counts, parents)
