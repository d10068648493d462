"""Trees of drafts: grown from the best candidates of each place, merged from those of two proposers, and cut.

`grow_tree` is the executable reference of csrc/bind_drafts.cpp, which draft heads call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.constraint import Constraint
from quire.core.drafts import ROOT, Drafts

UNKNOWN_ODDS = 0.5  # of a proposer that gives none
CONFIDENT = 0.98  # the odds of a draft whose chance is 1
MAX_CHILDREN = 6  # of a node
MIN_SURVIVAL = 0.01  # nodes that are less likely to be reached and right are left out

Floats = NDArray[np.float32]
Bias = Callable[[NDArray[np.int64]], Callable[[int], Floats]]  # of the tokens of a place, and of the token before them


class Candidates(NamedTuple):
    """The likeliest tokens of one place behind the last token.

    scores   log of each token's chance; with sampling plus its noise, times the temperature
    rest     chance of all other tokens
    """

    tokens: NDArray[np.int64]
    scores: Floats
    rest: float


def grow_tree(places: Sequence[Candidates], max_nodes: int, bias: Bias | None = None) -> Drafts:
    """The nodes that are likeliest to be reached and right, the likeliest first. A node at depth d has a token of
    places[d - 1]. This is the reference of the C++ that draft heads use (csrc/bind_drafts.cpp).

    `bias(tokens)(token)` is added to the scores of the tokens of a place behind `token`.
    """
    drafts = Drafts([], [], [])
    parents = drafts.parents
    assert parents is not None
    known: dict[tuple[int, int | None], list[tuple[float, int]]] = {}
    biases: dict[int, Callable[[int], Floats]] = {}  # by depth

    def children(depth: int, token: int | None) -> list[tuple[float, int]]:
        """(chance, token) of the best children of a node at `depth`, best first."""
        key = depth, token if bias is not None else None
        if key not in known:
            added = None
            if bias is not None and token is not None:
                if depth not in biases:
                    biases[depth] = bias(places[depth].tokens)
                added = biases[depth](token)
            known[key] = rank(places[depth], added)
        return known[key]

    heap: list[tuple[float, int, int, int, list[tuple[float, int]]]] = []  # (-survival, depth, nth, parent, siblings)

    def push(reached: float, depth: int, nth: int, parent: int, siblings: list[tuple[float, int]]) -> None:
        if nth < len(siblings) and reached * siblings[nth][0] >= MIN_SURVIVAL:
            heappush(heap, (-reached * siblings[nth][0], depth, nth, parent, siblings))

    if places:
        push(1.0, 0, 0, ROOT, children(0, None))
    while heap and len(drafts) < max_nodes:
        survival, depth, nth, parent, siblings = heappop(heap)
        chance, token = siblings[nth]
        node = len(drafts)
        drafts.tokens.append(token)
        parents.append(parent)
        drafts.odds.append(CONFIDENT * chance)
        push(-survival / chance, depth, nth + 1, parent, siblings)
        if depth + 1 < len(places) and len(drafts) < max_nodes:
            push(-survival, depth + 1, 0, node, children(depth + 1, token))
    return drafts


def rank(place: Candidates, bias: Floats | None) -> list[tuple[float, int]]:
    """(chance, token) of the likeliest candidates, best first. None if a score is not a number."""
    scores = place.scores if bias is None else place.scores + bias
    if not len(scores):
        return []
    largest = float(scores.max())
    if not math.isfinite(largest):
        return []
    weights = np.exp(scores - largest)
    total = float(weights.sum()) + max(0.0, place.rest) * math.exp(min(80.0, -largest))
    best = np.argsort(-weights, kind="stable")[:MAX_CHILDREN]
    chances = (weights[best].astype(np.float64) / total).tolist()
    return [pair for pair in zip(chances, place.tokens[best].tolist(), strict=True) if pair[0] > 0]


def merge(one: Drafts, other: Drafts) -> Drafts:
    """One tree of both. A draft that both have counts as one of `other`, with the higher odds."""
    tree = one.keep(range(len(one)))
    tree.parents = [one.parent(node) for node in range(len(one))]
    tree.sources = [one.source_of(node) for node in range(len(one))]
    tree.odds = tree.odds or [UNKNOWN_ODDS] * len(one)
    index: dict[tuple[int, int], int] = {
        (parent, token): node for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))
    }
    place = {ROOT: ROOT}  # from nodes of `other` to nodes of the tree
    for node, token in enumerate(other.tokens):
        key = place[other.parent(node)], token
        known = index.get(key)
        if known is None:
            known = index[key] = len(tree)
            tree.tokens.append(token)
            tree.parents.append(key[0])
            tree.odds.append(other.odds[node])
            tree.sources.append(other.source_of(node))
        else:
            tree.odds[known] = max(tree.odds[known], other.odds[node])
            tree.sources[known] = other.source_of(node)
        place[node] = known
    return tree


def reach(tree: Drafts, chances: Sequence[float]) -> list[float]:
    """The chance of each node that it and its ancestors are right."""
    survivals: list[float] = []
    for node, chance in enumerate(chances):
        parent = tree.parent(node)
        survivals.append(chance if parent == ROOT else survivals[parent] * chance)
    return survivals


def keep_allowed(tree: Drafts, constraint: Constraint) -> Drafts:
    """The nodes that a grammar allows after their path."""
    if tree.is_chain:
        tree.truncate(constraint.num_allowed(tree.tokens))
        return tree
    inner = {tree.parent(node) for node in range(len(tree))}
    allowed: set[int] = set()
    for leaf in range(len(tree)):
        if leaf not in inner:
            allowed.update(tree.path(leaf)[: constraint.num_allowed(tree.path_tokens(leaf))])
    return tree.keep(sorted(allowed))


def trunk_first(tree: Drafts, nodes: Sequence[int]) -> Drafts:
    """Some nodes of a tree, parents before children and likelier ones first, in the order of a row: the likeliest path,
    then the others."""
    if tree.is_chain and tree.sources is None:
        tree.truncate(len(nodes))  # they are its first ones
        return tree
    trunk: list[int] = []
    last = ROOT
    for node in nodes:
        if tree.parent(node) == last:
            trunk.append(node)
            last = node
    in_trunk = set(trunk)
    return tree.keep([*trunk, *(node for node in nodes if node not in in_trunk)])
