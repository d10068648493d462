"""Drafts: tokens that may follow a request's last token. A proposer makes them, a step verifies them.

A draft is right if it is the token that sampling gives at its position. So any proposer gives the same answer, and only
the speed depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

ROOT = -1  # as a parent: the request's last token


@dataclass(slots=True)
class Drafts:
    """The nodes of a tree, each after its parent. Without `parents` they are a chain.

    tokens    the nodes' tokens. Children of one parent have different tokens
    parents   index of each node's parent, or ROOT. Node i + 1 follows node i in a chain
    odds      for each node the chance that it is right if its parent is, as far as the proposer can tell
    source    the proposer's name
    sources   the proposer of each node, if they are of several
    on_device the device has made them, a chain, and only the device knows them: `tokens` are placeholders
    """

    tokens: list[int]
    parents: list[int] | None = None
    odds: list[float] = field(default_factory=list)
    source: str = ""
    sources: list[str] | None = None
    on_device: bool = False

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return self.parents is None

    def parent(self, node: int) -> int:
        return node - 1 if self.parents is None else self.parents[node]

    def source_of(self, node: int) -> str:
        return self.source if self.sources is None else self.sources[node]

    def depths(self) -> list[int]:
        """For each node its distance from the root, from 1."""
        if self.parents is None:
            return list(range(1, len(self.tokens) + 1))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    def path(self, node: int) -> list[int]:
        """The nodes from the root's child to `node`. For ROOT it is empty."""
        if self.parents is None:
            return list(range(node + 1))
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def path_tokens(self, node: int) -> list[int]:
        if self.parents is None:
            return self.tokens[: node + 1]
        return [self.tokens[each] for each in self.path(node)]

    def child(self, node: int, token: int) -> int | None:
        """The child of a node, or of ROOT, that has this token."""
        if self.parents is None:
            following = node + 1
            return following if following < len(self.tokens) and self.tokens[following] == token else None
        for each in range(node + 1, len(self.tokens)):
            if self.parents[each] == node and self.tokens[each] == token:
                return each
        return None

    def keep(self, nodes: Sequence[int]) -> Drafts:
        """A tree of some of the nodes, in that order. The parent of each must be among those before it."""
        new_index = {ROOT: ROOT} | {node: index for index, node in enumerate(nodes)}
        parents = [new_index[self.parent(node)] for node in nodes]
        is_chain = parents == list(range(-1, len(nodes) - 1))
        return Drafts(
            [self.tokens[node] for node in nodes],
            None if is_chain else parents,
            [self.odds[node] for node in nodes] if self.odds else [],
            self.source,
            [self.sources[node] for node in nodes] if self.sources is not None else None,
            self.on_device,
        )

    def truncate(self, count: int) -> None:
        """Drop all nodes after the first `count`. Parents come first, so the rest is a tree."""
        del self.tokens[count:], self.odds[count:]
        if self.parents is not None:
            del self.parents[count:]
        if self.sources is not None:
            del self.sources[count:]
