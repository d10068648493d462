"""describe_cache: the prefix tree as a message, bounded in size. `process.py` calls it when somebody looks.

It visits every node once, and no step is made meanwhile: some milliseconds for 10,000 nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain, islice

from quire.core.prefix_tree import Node
from quire.core.scheduler import Scheduler
from quire.engine.live_changes import CacheDescription, CacheNode, CacheRoot

MAX_REQUESTS = 8  # that are named with a node
MAX_TOKENS = 128  # of a node's text


@dataclass(slots=True)
class Branch:
    """Nodes in a row without a branch. The sums include what lies below."""

    nodes: list[Node]
    parent: int | None  # an index into the list of branches
    num_blocks: int = 0  # of its own
    num_below: int = 0
    num_hits: int = 0
    requests: set[int] = field(default_factory=set)  # numbers of running requests that go through it


def describe_cache(scheduler: Scheduler, number: int, salt: bytes | None, max_nodes: int) -> CacheDescription:
    """The prefixes of one salt, or of all. The largest branches come first, parents before their children."""
    tree, pool, holders = scheduler.kv.tree, scheduler.kv.pool, find_holders(scheduler)
    roots, shown = list[CacheRoot](), list[Branch]()
    for root_salt, root in tree.roots():
        found = find_branches(root, holders, len(shown))
        num_hits = root.num_hits + sum(branch.num_hits for branch in found if branch.parent is None)
        is_shown = salt is None or salt == root_salt
        roots.append(CacheRoot(is_shown, sum(branch.num_blocks for branch in found), num_hits))
        shown += found if is_shown else []
    chosen = sorted(range(len(shown)), key=lambda index: (-shown[index].num_below, index))[:max_nodes]
    places = {index: place for place, index in enumerate(chosen)}
    return CacheDescription(
        number=number,
        nodes=[make_node(shown[index], places) for index in chosen],
        roots=roots,
        num_hidden_blocks=sum(branch.num_blocks for index, branch in enumerate(shown) if index not in places),
        num_blocks=pool.num_blocks,
        num_free_blocks=pool.num_free,
        num_cached_blocks=sum(not pool.refs[block] for block in tree.owners),
        block_size=scheduler.kv.block_size,
        num_prompt_tokens=scheduler.counters.admitted_tokens,
        num_cached_tokens=scheduler.counters.cached_tokens,
        num_evicted=tree.num_evicted,
    )


def find_holders(scheduler: Scheduler) -> dict[Node, list[int]]:
    """The running requests by the last published node on their paths."""
    holders: dict[Node, list[int]] = {}
    for request in scheduler.running:
        if request.node is not None:
            holders.setdefault(request.node, []).append(request.sort_key[1] + 1)
    return holders


def find_branches(root: Node, holders: dict[Node, list[int]], offset: int) -> list[Branch]:
    """The branches below a root, parents first. `offset` is the index that the first one will have."""
    branches: list[Branch] = []
    pending: list[tuple[Node, int | None]] = [(child, None) for child in reversed(root.children)]
    while pending:
        node, parent = pending.pop()
        branch = Branch([node], parent)
        while len(node.children) == 1:
            node = node.children[0]
            branch.nodes.append(node)
        pending += [(child, offset + len(branches)) for child in reversed(node.children)]
        branches.append(branch)
    for branch in reversed(branches):
        branch.num_blocks = sum(len(node.blocks) - node.blocks.count(None) for node in branch.nodes)
        branch.num_below += branch.num_blocks
        branch.num_hits += sum(node.num_hits for node in branch.nodes)
        branch.requests.update(chain.from_iterable(holders[node] for node in branch.nodes if node in holders))
        if branch.parent is not None:
            above = branches[branch.parent - offset]
            above.num_below += branch.num_below
            above.num_hits += branch.num_hits
            above.requests |= branch.requests
    return branches


def make_node(branch: Branch, places: dict[int, int]) -> CacheNode:
    tokens = chain.from_iterable(node.tokens for node in branch.nodes)
    return CacheNode(
        None if branch.parent is None else places[branch.parent],
        branch.num_blocks,
        sum(len(node.tokens) for node in branch.nodes),
        list(islice(tokens, MAX_TOKENS)),
        branch.num_hits,
        sorted(branch.requests)[:MAX_REQUESTS],
    )
