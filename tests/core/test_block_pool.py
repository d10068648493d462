"""The free list: its order, and that a block is counted exactly."""

import pytest

from quire.core.block_pool import BlockPool

pytestmark = pytest.mark.core


def test_blocks_come_in_order_and_go_out_of_the_list() -> None:
    pool = BlockPool(3)
    assert [pool.allocate() for _ in range(3)] == [1, 2, 3]
    assert pool.num_free == 0
    assert pool.free_order() == []


def test_a_kept_block_is_evicted_last_and_a_worthless_one_first() -> None:
    pool = BlockPool(4)
    blocks = [pool.allocate() for _ in range(3)]
    pool.release(blocks[0], keep=True)
    pool.release(blocks[1], keep=False)
    assert pool.free_order() == [2, 4, 1]


def test_a_shared_block_stays_until_its_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.touch(block)
    pool.release(block, keep=True)
    assert pool.num_free == 1
    pool.release(block, keep=True)
    assert pool.num_free == 2


def test_a_free_block_can_be_revived_from_the_middle() -> None:
    pool = BlockPool(3)
    pool.touch(2)
    assert pool.free_order() == [1, 3]
    assert pool.refs[2] == 1


def test_releasing_too_often_is_seen() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="released too often"):
        pool.release(1, keep=False)


def test_taking_from_an_empty_pool_is_seen() -> None:
    pool = BlockPool(1)
    pool.allocate()
    with pytest.raises(AssertionError, match="no free block"):
        pool.allocate()


def test_changed_blocks_are_followed_only_when_that_is_wanted():
    pool = BlockPool(4)
    pool.allocate()
    assert pool.changed is None
    pool.changed = set()
    block = pool.allocate()
    assert pool.changed == {block}
    pool.changed = set()
    pool.touch(block)
    assert pool.changed == {block}
    pool.changed = set()
    pool.release(block, keep=True)
    assert pool.changed == {block}, "one request has it now, and no longer two"
