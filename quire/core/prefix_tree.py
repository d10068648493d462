"""PrefixTree: which published blocks hold which tokens, so that a cached prefix is not recomputed.

A node is one full block of tokens below its parent. The path from a root to a node is a prefix. Each tenant salt has
its own root. Every node has a digest chained from the salt, under which its eviction is recorded. A look-up compares
tokens, not digests, so a hash collision cannot return the cache of another prompt. `KVCache` calls this.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from operator import attrgetter

DIGEST_BYTES = 16

_tokens_of = attrgetter("tokens")


class MissKind(Enum):
    """Why a look-up matched no more tokens."""

    NEVER_SEEN = "never seen"
    DIVERGED = "diverged"
    EVICTED = "evicted"
    SALTED_APART = "salted apart"  # cached for another salt. For the operator only: it reveals other tenants' prompts
    BELOW_FLOOR = "below the block floor"


@dataclass(frozen=True, slots=True)
class Miss:
    """Why the tokens from position `token` on were not found, and the step of the eviction if that is the reason."""

    kind: MissKind
    token: int
    step: int | None = None

    def __str__(self) -> str:
        when = f" at step {self.step}" if self.step is not None else ""
        return f"{self.kind.value}{when}, from token {self.token}"


class Node:
    """One block of tokens. `blocks` holds the cache block of each group, None where it is evicted."""

    __slots__ = ("blocks", "children", "depth", "known_digest", "num_changes", "num_hits", "parent", "pins", "tokens")

    def __init__(self, parent: Node | None, tokens: tuple[int, ...], num_groups: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.known_digest = b""  # empty until `digest` computes it; a root's is set at once
        self.depth: int = parent.depth + 1 if parent else 0
        self.blocks: list[int | None] = [None] * num_groups
        self.children: list[Node] = []  # sorted by tokens
        self.pins = 0  # requests that publish below this node
        self.num_hits = 0  # requests whose match ended here, or below here in a node that has been pruned
        self.num_changes = 0  # incremented when a child gets a block, and when this node is pruned

    @property
    def digest(self) -> bytes:
        """A hash of the salt and of all tokens up to this node, chained from the root's digest."""
        path, node = list[Node](), self
        while not node.known_digest:
            assert node.parent is not None
            path.append(node)
            node = node.parent
        for below in reversed(path):
            below.known_digest = chain(node.known_digest, below.tokens)
            node = below
        return self.known_digest

    def child(self, tokens: tuple[int, ...]) -> Node | None:
        if len(self.children) <= 1:
            return self.children[0] if self.children and self.children[0].tokens == tokens else None
        index = bisect_left(self.children, tokens, key=_tokens_of)
        if index < len(self.children) and self.children[index].tokens == tokens:
            return self.children[index]
        return None

    def nearest_child(self, tokens: tuple[int, ...]) -> tuple[Node | None, int]:
        """The child that shares the longest prefix with `tokens`, and the length of that prefix.

        Children are sorted, so it is one of the two neighbours of the index at which `tokens` would be inserted.
        """
        index = bisect_left(self.children, tokens, key=_tokens_of)
        neighbours = self.children[max(index - 1, 0) : index + 1]
        best, length = None, 0
        for node in neighbours:
            shared = shared_length(node.tokens, tokens)
            if shared > length:
                best, length = node, shared
        return best, length


@dataclass(frozen=True, slots=True)
class Match:
    """The longest usable prefix: full blocks along `path`, then `num_partial` tokens of `partial`, which are copied.

    `end` is the last node of the path, or the root; None if the salt has no root. `num_changes` is the change count
    at the time of the look-up (`PrefixTree.has_grown`).
    """

    path: list[Node] = field(default_factory=list)
    partial: Node | None = None
    num_partial: int = 0
    miss: Miss | None = None
    end: Node | None = None
    num_changes: int = 0


@dataclass(frozen=True, slots=True)
class PrefixChanges:
    """Digests of blocks that were published and evicted since the last report. A router of replicas follows them."""

    published: list[bytes]
    evicted: list[bytes]


class PrefixTree:
    """Published blocks by content. `windows` has an entry for each cache group: its attention window, or None."""

    def __init__(self, block_size: int, windows: Sequence[int | None], max_evicted: int) -> None:
        self.block_size = block_size
        self.windows = tuple(windows)
        self.owners: dict[int, tuple[Node, int]] = {}  # block -> node and group
        self._roots: dict[bytes, Node] = {}
        self._first_blocks: dict[tuple[int, ...], int] = {}  # tokens right below a root -> number of such roots
        self._evicted: dict[bytes, int] = {}  # digest -> step, oldest first
        self._max_evicted = max_evicted
        self._num_changes = 0  # blocks published since the start
        self.num_evicted = 0  # published blocks that were taken for other tokens
        self._changes: dict[bytes, bool] | None = None  # digest -> is published; None: nobody asks for them

    def report_changes(self) -> PrefixChanges:
        """What was published and evicted since the last call. The first call begins to keep it."""
        changes, self._changes = self._changes or {}, {}
        published = [digest for digest, is_published in changes.items() if is_published]
        return PrefixChanges(published, [digest for digest, is_published in changes.items() if not is_published])

    def roots(self) -> Iterable[tuple[bytes, Node]]:
        return self._roots.items()

    def root(self, salt: bytes) -> Node:
        if salt not in self._roots:
            self._roots[salt] = root = Node(None, (), len(self.windows))
            root.known_digest = root_digest(salt)
        return self._roots[salt]

    def insert(self, parent: Node, tokens: tuple[int, ...], blocks: Sequence[int | None]) -> Node:
        """Publish one block of tokens below `parent`. A node that already has a block keeps it."""
        node = parent.child(tokens)
        if node is None:
            node = Node(parent, tokens, len(self.windows))
            insort(parent.children, node, key=_tokens_of)
            if parent.parent is None:
                self._first_blocks[tokens] = self._first_blocks.get(tokens, 0) + 1
        for group, block in enumerate(blocks):
            if block is not None and node.blocks[group] is None and block not in self.owners:
                node.blocks[group] = block
                self.owners[block] = (node, group)
                parent.num_changes += 1
                self._num_changes += 1
                if group == 0 and self._changes is not None:
                    self._changes[node.digest] = True
        return node

    def forget(self, block: int, step: int) -> None:
        """Remove a block, whose contents are about to change, and record the eviction."""
        node, group = self.owners.pop(block)
        self.num_evicted += 1
        node.blocks[group] = None
        digest = node.digest
        if group == 0 and self._changes is not None:
            self._changes[digest] = False
        self._evicted.pop(digest, None)
        self._evicted[digest] = step
        if len(self._evicted) > self._max_evicted:
            del self._evicted[next(iter(self._evicted))]
        self.prune(node)

    def prune(self, node: Node | None) -> None:
        """Remove a node without blocks, children and pins; then its parent if that has none either, and so on."""
        while node and not node.pins and not node.children and all(block is None for block in node.blocks):
            parent = node.parent
            node.num_changes += 1
            if parent is None:
                self._roots = {salt: root for salt, root in self._roots.items() if root is not node}
                return
            del parent.children[bisect_left(parent.children, node.tokens, key=_tokens_of)]
            parent.num_hits += node.num_hits
            if parent.parent is None:
                self._first_blocks[node.tokens] -= 1
                if not self._first_blocks[node.tokens]:
                    del self._first_blocks[node.tokens]
            node = parent

    def lookup(self, tokens: Sequence[int], salt: bytes, limit: int) -> Match:
        """The longest published prefix of tokens[:limit] of which no block that is needed is evicted."""
        root = self._roots.get(salt)
        path = self._walk(root, tokens, limit) if root else []
        node = path[-1] if path else root
        start = len(path) * self.block_size
        rest = tuple(tokens[start : min(start + self.block_size, limit)])
        partial, shared = node.nearest_child(rest) if node else (None, 0)
        reach = start + shared
        if partial is not None and any(block is None for block in partial.blocks):
            partial, shared = None, 0
        miss = None
        if start + shared < limit:
            block = tuple(tokens[start : start + self.block_size])
            miss = self._explain(node.digest if node else root_digest(salt), block, start, reach)
        return Match(path, partial, shared, miss, node, self._count_changes(node))

    def has_grown(self, match: Match, salt: bytes) -> bool:
        """Whether a look-up of the same tokens may now find more than `match`."""
        if match.end is None:
            return salt in self._roots
        return self._count_changes(match.end) != match.num_changes

    def _count_changes(self, end: Node | None) -> int:
        """With windows a match may span evicted blocks, so a block published anywhere below `end` may extend it."""
        if end is None:
            return 0
        return end.num_changes if self.windows == (None,) else self._num_changes

    def _walk(self, root: Node, tokens: Sequence[int], limit: int) -> list[Node]:
        if self.windows == (None,):
            return self._walk_full_attention(root, tokens, limit)
        path: list[Node] = []
        runs = [0] * len(self.windows)  # consecutive blocks present up to this node, by group
        usable, node = 0, root
        for start in range(0, limit - self.block_size + 1, self.block_size):
            child = node.child(tuple(tokens[start : start + self.block_size]))
            if child is None:
                break
            path.append(child)
            node = child
            runs = [run + 1 if block is not None else 0 for run, block in zip(runs, child.blocks, strict=True)]
            if all(
                run >= len(path) - first_block(len(path) * self.block_size, window, self.block_size)
                for run, window in zip(runs, self.windows, strict=True)
            ):
                usable = len(path)
        return path[:usable]

    def _walk_full_attention(self, root: Node, tokens: Sequence[int], limit: int) -> list[Node]:
        """`_walk` for one group without a window. It is several times as fast; prompts have thousands of blocks."""
        path: list[Node] = []
        size, node = self.block_size, root
        for start in range(0, limit - size + 1, size):
            child = node.child(tuple(tokens[start : start + size]))
            if child is None or child.blocks[0] is None:
                break
            path.append(child)
            node = child
        return path

    def _explain(self, digest: bytes, block: tuple[int, ...], start: int, reach: int) -> Miss:
        """`digest` is that of the last matched node, `block` holds the next tokens, the first `reach` tokens agree."""
        if (step := self._evicted.get(chain(digest, block))) is not None:
            return Miss(MissKind.EVICTED, start, step)
        if reach > start:
            return Miss(MissKind.DIVERGED, reach)
        if len(block) < self.block_size:
            return Miss(MissKind.BELOW_FLOOR, start)
        if start == 0 and block in self._first_blocks:
            return Miss(MissKind.SALTED_APART, 0)
        return Miss(MissKind.NEVER_SEEN, start)


def root_digest(salt: bytes) -> bytes:
    return blake2b(salt, digest_size=DIGEST_BYTES, person=b"quire").digest()


def chain(digest: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of a node, from its parent's digest and its own tokens."""
    return blake2b(digest + array("Q", tokens).tobytes(), digest_size=DIGEST_BYTES).digest()


def shared_length(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common prefix of two sequences."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


def first_block(position: int, window: int | None, block_size: int) -> int:
    """The index of the first block that a token at `position` attends to."""
    return 0 if window is None else max(0, position - window + 1) // block_size
