"""What must hold of a scheduler after every step, whatever happened before."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from quire.core.prefix_tree import Node
from quire.core.request import Request, State
from quire.core.scheduler import Scheduler


def check(scheduler: Scheduler, held_in_flight: list[Request]) -> None:
    """`held_in_flight`: requests that are named by a plan not yet committed; some have ended or were preempted."""
    submitted = list(scheduler.requests.values())
    live = list(
        dict.fromkeys(
            beam for request in submitted for beam in (request.beam.group.beams if request.beam else [request])
        )
    )
    holders = list({id(request): request for request in [*live, *held_in_flight]}.values())
    check_blocks(scheduler, holders)
    check_host(scheduler, live)
    check_tree(scheduler, holders)
    check_queues(scheduler, live)


def check_blocks(scheduler: Scheduler, holders: list[Request]) -> None:
    pool = scheduler.kv.pool
    tables = [table for request in holders for table in (*request.tables, *request.fixed_tables)]
    refs = Counter(block for table in tables for block in table if block is not None)
    assert 0 not in refs
    for block in range(1, pool.num_blocks + 1):
        assert pool.refs[block] == refs[block], f"block {block}: {pool.refs[block]} references, {refs[block]} holders"
    free = pool.free_order()
    assert len(free) == len(set(free)) == pool.num_free
    assert set(free) == {block for block in range(1, pool.num_blocks + 1) if not refs[block]}
    fixed = {block for request in holders for table in request.fixed_tables for block in table}
    assert fixed.isdisjoint(scheduler.kv.tree.owners), "a block that holds no tokens of a prefix is published"
    assert fixed.isdisjoint(block for request in holders for table in request.tables for block in table)


def check_host(scheduler: Scheduler, live: list[Request]) -> None:
    """Each host block is free or belongs to one waiting request. Pending copies go to host blocks in use."""
    swap = scheduler.swap
    swapped_out = [request for request in live if request.swapped_out is not None]
    assert all(request.state is State.WAITING for request in swapped_out)
    used = [block for request in swapped_out if request.swapped_out for block in request.swapped_out.host_blocks]
    free = [*swap._freed, *range(swap._num_ever_used, swap.num_host_blocks)]
    assert sorted([*used, *free]) == list(range(swap.num_host_blocks))
    assert len(free) == swap.num_free
    assert {host_block for _, host_block in swap._pending_swap_out} <= set(used)


def check_tree(scheduler: Scheduler, holders: list[Request]) -> None:
    tree = scheduler.kv.tree
    seen: dict[int, tuple[Node, int]] = {}
    pins = Counter(id(request.node) for request in holders if request.node is not None)

    def visit(node: Node) -> None:
        assert all(a.tokens < b.tokens for a, b in pairwise(node.children))
        for group, block in enumerate(node.blocks):
            if block is not None:
                seen[block] = (node, group)
        kept = node.pins or node.children or any(block is not None for block in node.blocks)
        assert kept, "an empty node stayed in the tree"
        assert node.pins == pins[id(node)]
        for child in node.children:
            assert child.parent is node
            assert child.depth == node.depth + 1
            visit(child)

    for root in tree._roots.values():
        visit(root)
    assert seen == tree.owners


def check_queues(scheduler: Scheduler, live: list[Request]) -> None:
    running = scheduler.running
    assert len(running) <= scheduler.max_requests
    groups = {id(request.beam.group) for request in running if request.beam}
    assert groups == set(map(id, scheduler._beam_groups))
    for group in scheduler._beam_groups:
        assert group.root in group.beams
        assert all(beam in running for beam in group.beams)
        assert len(group.beams) <= group.width
        assert len({len(beam.tokens) for beam in group.beams}) == 1
        assert len({tuple(beam.tokens) for beam in group.beams}) == len(group.beams)
    assert all(request.state is State.RUNNING for request in running)
    assert [r.sort_key for r in running] == sorted(r.sort_key for r in running)
    waiting = [request for _, request in scheduler._waiting if not request.finished]
    assert len(waiting) == scheduler.num_waiting
    assert sum(len(request.tokens) for request in waiting) == scheduler._waiting_tokens
    assert sum(request.state is State.RUNNING for request in live) == len(running)
    assert sum(request.state is State.WAITING for request in live) == len(waiting)
    for request in live:
        if request.state in (State.WAITING, State.HELD):
            assert not request.tables
            assert not request.fixed_tables
            continue
        num_fixed = sum(map(len, request.fixed_tables))
        assert num_fixed == scheduler.kv.num_fixed(len(request.encoder_tokens))
        assert request.num_computed <= request.num_planned <= len(request.tokens) + request.num_expected + 8
        assert len({len(table) for table in request.tables}) <= 1
