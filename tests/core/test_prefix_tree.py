"""Look-ups: how far they reach, down to a token, and why they go no further."""

import random

import pytest

from quire.core.prefix_tree import Miss, MissKind, PrefixTree, chain, root_digest, shared_length

pytestmark = pytest.mark.core

ABC = list(range(1, 13))  # three blocks of four


def tree_with(tokens: list[int], salt: bytes = b"", windows=(None,), first: int = 1) -> PrefixTree:
    tree = PrefixTree(4, windows, max_evicted=100)
    publish(tree, tokens, salt, first)
    return tree


def publish(tree: PrefixTree, tokens: list[int], salt: bytes = b"", first: int = 1) -> None:
    node, groups = tree.root(salt), len(tree.windows)
    for index in range(len(tokens) // 4):
        blocks = [first + index * groups + group for group in range(groups)]
        node = tree.insert(node, tuple(tokens[4 * index : 4 * index + 4]), blocks)


def reach(tree: PrefixTree, tokens: list[int], salt: bytes = b"") -> tuple[int, Miss | None]:
    match = tree.lookup(tokens, salt, len(tokens) - 1)
    return 4 * len(match.path) + match.num_partial, match.miss


def test_whole_blocks_and_then_tokens_inside_the_next() -> None:
    match = tree_with(ABC).lookup([*ABC[:6], 99, 99, 99], b"", 8)
    assert [node.blocks for node in match.path] == [[1]]
    assert match.partial is not None
    assert (match.partial.blocks, match.num_partial) == ([2], 2)
    assert match.miss == Miss(MissKind.DIVERGED, 6)


def test_the_last_token_is_left_to_compute() -> None:
    assert reach(tree_with(ABC), ABC) == (11, None)


def test_never_seen() -> None:
    tree = tree_with(ABC)
    assert reach(tree, [50, 51, 52, 53, 54]) == (0, Miss(MissKind.NEVER_SEEN, 0))
    assert reach(tree, [*ABC, 1, 2, 3, 4, 5]) == (12, Miss(MissKind.NEVER_SEEN, 12))


def test_diverged_inside_the_first_block() -> None:
    assert reach(tree_with(ABC), [1, 2, 9, 9, 9]) == (2, Miss(MissKind.DIVERGED, 2))


def test_below_the_block_floor() -> None:
    assert reach(tree_with(ABC), [50, 51, 52]) == (0, Miss(MissKind.BELOW_FLOOR, 0))
    assert reach(tree_with(ABC), [*ABC, 50, 51]) == (12, Miss(MissKind.BELOW_FLOOR, 12))


def test_salted_apart() -> None:
    tree = tree_with(ABC, salt=b"tenant a")
    assert reach(tree, ABC, salt=b"tenant b") == (0, Miss(MissKind.SALTED_APART, 0))


def test_evicted_says_when() -> None:
    tree = tree_with(ABC)
    tree.forget(3, step=77)
    assert reach(tree, [*ABC, 1]) == (8, Miss(MissKind.EVICTED, 8, 77))
    tree.forget(2, step=78)
    tree.forget(1, step=79)
    assert reach(tree, ABC) == (0, Miss(MissKind.EVICTED, 0, 79))
    assert str(Miss(MissKind.EVICTED, 0, 79)) == "evicted at step 79, from token 0"


def test_an_emptied_tree_keeps_nothing_but_bounded_memories() -> None:
    tree = PrefixTree(4, (None,), max_evicted=2)
    publish(tree, ABC)
    for block in (3, 2, 1):
        tree.forget(block, step=1)
    assert not tree._roots
    assert not tree.owners
    assert not tree._first_blocks
    assert len(tree._evicted) == 2


def test_content_that_is_there_keeps_its_block() -> None:
    tree = tree_with(ABC)
    publish(tree, ABC, first=40)
    assert set(tree.owners) == {1, 2, 3}


def test_the_digest_is_chained_from_the_salt() -> None:
    tree = tree_with(ABC, salt=b"s")
    first = tree.root(b"s").children[0]
    assert first.digest == chain(root_digest(b"s"), ABC[:4])
    assert first.children[0].digest == chain(first.digest, ABC[4:8])
    assert root_digest(b"s") != root_digest(b"t")


def test_a_window_needs_only_its_last_blocks() -> None:
    tree = tree_with(ABC, windows=(None, 4))
    tree.forget(2, step=5)  # the window group's first block: behind the window after 8 tokens
    assert reach(tree, [*ABC, 1])[0] == 12
    tree.forget(6, step=6)  # its last one: then nothing but the shorter match is usable
    assert reach(tree, [*ABC, 1])[0] == 8


def test_the_nearest_child_is_the_best_of_all() -> None:
    rng = random.Random(3)
    for _ in range(200):
        tree = PrefixTree(6, (None,), max_evicted=10)
        root = tree.root(b"")
        children = {tuple(rng.randrange(3) for _ in range(6)) for _ in range(rng.randint(0, 12))}
        for block, tokens in enumerate(children, 1):
            tree.insert(root, tokens, [block])
        wanted = tuple(rng.randrange(3) for _ in range(rng.randint(1, 6)))
        _, length = root.nearest_child(wanted)
        assert length == max((shared_length(tokens, wanted) for tokens in children), default=0)
