"""The router of replicas: what it knows of their caches, and where it sends requests."""

from __future__ import annotations

import random

import pytest

from quire.core.prefix_tree import PrefixTree
from quire.core.routing import MAX_RECEIPTS, Average, ReplicaState, Router, hash_blocks

pytestmark = pytest.mark.core

SIZE = 4


def router(count=2, max_requests=4, num_blocks=100):
    return Router([ReplicaState(max_requests, num_blocks) for _ in range(count)], SIZE)


def prompt(seed, length=40):
    return [random.Random(seed).randrange(1000) for _ in range(length)]


def publish(routing, replica, tokens, salt=b""):
    routing.replicas[replica].publish(hash_blocks(tokens, salt, SIZE), ())


def test_digests_are_those_of_the_prefix_tree():
    tree = PrefixTree(SIZE, [None], 10)
    tokens = prompt(1, 14)
    node = tree.root(b"salt")
    expected = []
    for block, start in enumerate(range(0, 12, SIZE)):
        node = tree.insert(node, tuple(tokens[start : start + SIZE]), [block])
        expected.append(node.digest)
    assert list(hash_blocks(tokens, b"salt", SIZE)) == expected
    assert list(hash_blocks(tokens, b"other", SIZE)) != expected
    assert list(hash_blocks(tokens[:3], b"salt", SIZE)) == []


@pytest.mark.parametrize("seed", range(5))
def test_what_a_tree_reports_is_what_it_has(seed):
    """Blocks come and go in any order; whoever follows the reports has the tree's own digests."""
    rng = random.Random(seed)
    tree = PrefixTree(SIZE, [None], 50)
    followed = ReplicaState(1, 100)
    assert tree.report_changes().published == []
    for step in range(400):
        free = [block for block in range(12) if block not in tree.owners]
        if free and rng.random() < 0.6:
            node = tree.root(bytes([rng.randrange(2)]))
            for _ in range(rng.randrange(1, 4)):
                free = [block for block in range(12) if block not in tree.owners]
                node = tree.insert(node, (rng.randrange(3),) * SIZE, [free[0] if free else None])
        elif tree.owners:
            tree.forget(rng.choice(list(tree.owners)), step)
        if rng.random() < 0.3:
            changes = tree.report_changes()
            assert not set(changes.published) & set(changes.evicted)
            followed.publish(changes.published, changes.evicted)
            assert followed.prefixes == {node.digest for node, _ in tree.owners.values()}


def test_equal_choices_depend_on_the_prefix_alone():
    homes = {}
    for seed in range(40):
        tokens = prompt(seed)
        homes[seed] = {router(4).choose("a", [*tokens, extra], b"", 10) for extra in range(5)}
    assert all(len(home) == 1 for home in homes.values())
    assert len(set.union(*homes.values())) == 4


def test_a_request_goes_where_its_prefix_is():
    for replica in range(3):
        routing = router(3)
        publish(routing, replica, prompt(1))
        assert routing.choose("a", [*prompt(1), 5], b"", 10) == replica
        assert routing.receipts["a"].chosen.cached == 40


def test_another_tenants_prefix_does_not_count():
    routing = router(2)
    publish(routing, 0, prompt(1), b"one")
    routing.choose("a", [*prompt(1), 5], b"two", 10)
    assert routing.receipts["a"].chosen.cached == 0


def test_requests_with_a_prefix_that_is_being_computed_follow_the_first():
    routing = router(4, max_requests=64)
    shared = prompt(1, 400)
    first = routing.choose("a", [*shared, 1], b"", 10)
    routing.begin("a")
    assert {routing.choose(f"b{index}", [*shared, index], b"", 10) for index in range(8)} == {first}


def test_a_busy_replica_is_left_when_computing_elsewhere_ends_sooner():
    routing = router(2, max_requests=1)
    for state in routing.replicas:
        state.measure(1, 1, 0.01)
        state.measure(101, 1, 0.11)  # 1 ms a prompt token
    publish(routing, 0, prompt(1))
    assert routing.choose("a", [*prompt(1), 5], b"", 100) == 0
    # 40 cached tokens save 0.04 s, and waiting for the first answer costs a second.
    assert routing.choose("b", [*prompt(1), 5], b"", 100) == 1
    routing.end("a", 100)
    assert routing.choose("c", [*prompt(1), 5], b"", 100) == 0


def test_prompts_that_wait_count():
    routing = router(2, max_requests=64)
    publish(routing, 0, prompt(1, 8))
    routing.choose("long", prompt(2, 500), b"", 10)
    other = 1 - routing._routed["long"].replica
    assert routing.choose("short", prompt(3, 8), b"", 10) == other
    routing.begin("long")
    assert all(state.missing_tokens == (8 if index == other else 0) for index, state in enumerate(routing.replicas))


def test_what_is_not_ready_is_not_chosen():
    routing = router(2)
    routing.replicas[0].ready = False
    assert {routing.choose(str(index), prompt(index), b"", 5) for index in range(10)} == {1}
    assert routing.choose("x", prompt(1), b"", 5, avoid={1}) == 1  # there is no other
    routing.replicas[1].ready = False
    assert routing.choose("y", prompt(1), b"", 5) is None


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_left_when_all_have_ended(seed):
    rng = random.Random(seed)
    routing, alive, number = router(3), [], 0
    for _ in range(600):
        if alive and rng.random() < 0.5:
            name = alive.pop(rng.randrange(len(alive)))
            if rng.random() < 0.5:
                routing.begin(name)
            routing.end(name, rng.choice([None, 0, 7]))
            routing.end(name)  # again, as when a client leaves at the same moment
        else:
            number += 1
            alive.append(str(number))
            routing.choose(alive[-1], prompt(rng.randrange(9), rng.randrange(1, 60)), b"", 9, rng.randrange(1, 4))
    for name in alive:
        routing.end(name)
    assert [(state.missing_tokens, state.num_answers) for state in routing.replicas] == [(0, 0)] * 3
    assert not routing._routed


def test_memory_is_bounded():
    routing = router(2, num_blocks=20)
    for number in range(MAX_RECEIPTS + 500):
        routing.choose(str(number), prompt(number, 9), b"", 5)
        routing.end(str(number))
    assert len(routing.receipts) == MAX_RECEIPTS
    assert all(len(state.expected) <= 20 for state in routing.replicas)
    routing.replicas[0].forget()
    assert not routing.replicas[0].expected


def test_a_receipt_is_a_sentence_with_numbers():
    routing = router(2, max_requests=8)
    publish(routing, 1, prompt(1))
    for name in "ab":
        routing.choose(name, [*prompt(1), 1], b"", 10)
    text = str(routing.receipts["b"])
    assert text == "replica 1: 40 of 41 tokens cached, 1 answer before it, 0.20 s; replica 0 idle and cold, 0.24 s"


def test_times_are_measured():
    average = Average(5.0)
    average.add(1.0)
    assert average.value == 1.0
    average.add(2.0)
    assert 1.0 < average.value < 1.2
    state = ReplicaState(8, 10)
    state.measure(3, 3, 0.03)
    state.measure(103, 3, 0.13)
    assert state.token_s.value == pytest.approx(0.001)
    assert state.decode_step_s(2) == state.decode_step_s(3) == state.decode_step_s(64) == 0.03
    state.measure(40, 40, 0.1)
    assert state.decode_step_s(64) == 0.1


def test_what_is_to_be_avoided_is_the_last_choice():
    routing = router(3)
    publish(routing, 1, prompt(1))
    assert routing.choose("a", [*prompt(1), 5], b"", 5, avoid={1}) != 1
    assert routing.choose("b", [*prompt(1), 5], b"", 5, avoid={0, 2}) == 1


def test_short_prompts_spread():
    assert {router(4).choose("a", prompt(seed, 3), b"", 10) for seed in range(40)} == set(range(4))


def test_replicas_that_keep_no_prefixes():
    """Nothing counts as cached there, also not what they have just computed."""
    routing = router(2, num_blocks=0)
    homes = set()
    for number in range(40):
        homes.add(routing.choose(str(number), [*prompt(1), number], b"", 10))
        assert routing.receipts[str(number)].chosen.cached == 0
        routing.begin(str(number))
    assert homes == {0, 1}


def test_a_refused_request_leaves_nothing_behind():
    routing = router(2)
    chosen = routing.choose("a", [*prompt(1), 5], b"", 10)
    routing.end("a")
    assert not routing.replicas[chosen].expected
    routing.choose("b", [*prompt(1), 5], b"", 10)
    routing.begin("b")
    routing.end("b")  # a client that has left after the first token
    assert routing.replicas[chosen].expected
    routing.choose("c", [*prompt(1), 5], b"", 10)
    routing.end("c")  # its blocks are those of the one before
    assert len(routing.replicas[chosen].expected) == 10
