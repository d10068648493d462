"""DynamicTree: a draft tree that grows where it is likeliest to be reached, as EAGLE-2's.

At each depth the likeliest nodes get children, which a model proposes. At the end the likeliest nodes of all are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.drafts import ROOT, Drafts
from quire.speculative.draft_tree import CONFIDENT, MIN_SURVIVAL


class DynamicTree:
    """Survival: the chance that a node and its ancestors are right."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._chances: list[float] = []
        self._survivals: list[float] = []
        self._num_older = 0  # nodes above the deepest ones

    def add(self, children: Sequence[tuple[int, Sequence[tuple[float, int]]]]) -> None:
        """The next depth: (chance, token) of each node's children, likeliest first."""
        self._num_older = len(self.tokens)
        for parent, ranked in children:
            reached = 1.0 if parent == ROOT else self._survivals[parent]
            for chance, token in ranked:
                if reached * chance >= MIN_SURVIVAL:
                    self.tokens.append(token)
                    self.parents.append(parent)
                    self._chances.append(chance)
                    self._survivals.append(reached * chance)

    def likeliest(self, count: int) -> list[int]:
        """The likeliest of the deepest nodes."""
        deepest = range(self._num_older, len(self.tokens))
        return sorted(deepest, key=lambda node: -self._survivals[node])[:count]

    def drafts(self, max_nodes: int) -> Drafts:
        """The likeliest nodes of all, the likeliest first. No node is likelier than its parent, which comes first."""
        order = sorted(range(len(self.tokens)), key=lambda node: -self._survivals[node])
        tree = Drafts(self.tokens, self.parents, [CONFIDENT * chance for chance in self._chances])
        return tree.keep(order[:max_nodes])
