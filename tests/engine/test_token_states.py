"""What an EAGLE head remembers between steps: states of tokens, and how far blocks are filled."""

from __future__ import annotations

import random

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.core.block_pool import BlockPool
from quire.engine.token_states import FilledBlocks, TokenStates

pytestmark = pytest.mark.cpu

ROW_BYTES = 8


def rows(*positions: int) -> NDArray[np.float32]:
    return np.array([[position, -position] for position in positions], np.float32)


def held(states: TokenStates, name: str, stop: int) -> list[float] | None:
    """The positions of the request's states."""
    run = states.find(name, stop)
    if run is None:
        return None
    values = np.concatenate(run.parts)[:, 0].tolist()
    assert values == list(range(run.start, run.stop))
    return values


def test_states_of_steps_are_joined() -> None:
    states = TokenStates(1000)
    states.add("a", 0, rows(0, 1, 2))
    states.add("b", 7, rows(7))
    states.add("a", 3, rows(3))
    assert held(states, "a", 4) == [0, 1, 2, 3]
    assert held(states, "a", 3) is None
    assert held(states, "b", 8) == [7]
    assert held(states, "c", 0) is None
    assert states.num_bytes == 5 * ROW_BYTES


def test_tokens_that_are_computed_again_replace_the_old_ones() -> None:
    states = TokenStates(1000)
    states.add("a", 4, rows(4, 5))
    states.add("a", 6, rows(6, 7))
    states.add("a", 5, rows(5))
    assert held(states, "a", 6) == [4, 5]
    states.add("a", 2, rows(2, 3))
    assert held(states, "a", 4) == [2, 3]
    states.add("a", 9, rows(9))  # a gap
    assert held(states, "a", 10) == [9]
    assert states.num_bytes == ROW_BYTES
    states.add("a", 9, rows(9, 10))
    assert held(states, "a", 11) == [9, 10]


def test_the_oldest_states_are_dropped() -> None:
    states = TokenStates(6 * ROW_BYTES)
    states.add("a", 0, rows(0, 1, 2))
    states.add("b", 0, rows(0))
    states.add("a", 3, rows(3))
    states.add("b", 1, rows(1))
    states.add("b", 2, rows(2))
    assert held(states, "a", 4) == [3]
    assert held(states, "b", 3) == [0, 1, 2]
    states.add("c", 0, rows(*range(9)))  # more than there may be
    assert states.num_bytes == 0
    assert held(states, "c", 9) is None


def test_the_last_token_is_kept() -> None:
    states = TokenStates(1000)
    states.add("a", 4, rows(4, 5))
    states.add("a", 6, rows(6, 7))
    states.keep_last("a")
    assert held(states, "a", 8) == [7]
    assert states.num_bytes == ROW_BYTES
    states.add("a", 8, rows(8))
    assert held(states, "a", 9) == [7, 8]
    states.finish("a")
    states.finish("unknown")
    assert states.num_bytes == 0


def make_blocks() -> tuple[FilledBlocks, BlockPool]:
    pool = BlockPool(20)
    return FilledBlocks(4, lambda: pool), pool


def test_a_run_begins_where_blocks_are_filled() -> None:
    blocks, _ = make_blocks()
    table = [5, 2, 9, 7]
    assert blocks.find_begin(table, 0) == 0
    assert blocks.find_begin(table, 4) == 4
    assert blocks.find_begin(table, 5) == 8  # token 4 is missing
    blocks.fill(table, 4, 10)
    assert [blocks.count(block) for block in table] == [0, 4, 2, 0]
    assert blocks.find_begin(table, 10) == 4
    assert blocks.find_begin(table, 9) == 4
    assert blocks.find_begin(table, 11) == 12
    blocks.fill(table, 0, 4)
    assert blocks.find_begin(table, 10) == 0
    assert blocks.find_stop(table, 0, 16) == 10
    assert blocks.find_stop(table, 3, 7) == 7
    assert blocks.find_stop(table, 12, 16) == 12
    assert blocks.find_begin([None, *table[1:]], 10) == 4  # behind a window
    assert blocks.find_begin([None, None, *table[1:]], 0) == 8
    assert blocks.find_begin([None, None, *table[1:]], 3) == 8


def test_what_is_written_or_allocated_again_is_not_filled() -> None:
    blocks, pool = make_blocks()
    table = [5, 2, 9]
    blocks.fill(table, 0, 12)
    blocks.truncate(table, 6, 10)
    assert [blocks.count(block) for block in table] == [4, 2, 0]
    blocks.truncate(table, 7, 8)
    assert blocks.count(2) == 2
    pool.num_allocations[5] += 1
    assert blocks.count(5) == 0
    blocks.fill(table, 0, 3)
    assert blocks.count(5) == 3
    blocks.reset()
    assert blocks.count(5) == 0


def test_a_copy_is_filled_as_far_as_its_source() -> None:
    blocks, pool = make_blocks()
    blocks.fill([5, 6], 0, 7)
    blocks.copy(6, 8)
    assert blocks.count(8) == 3
    blocks.copy(9, 8)
    assert blocks.count(8) == 0
    blocks.fill([5], 0, 4)
    pool.num_allocations[5] += 1
    blocks.copy(5, 8)
    assert blocks.count(8) == 0


def test_blocks_against_a_simple_model() -> None:
    """Random operations, against a set of the filled places of each block."""
    rng = random.Random(0)
    blocks, pool = make_blocks()
    filled: dict[int, int] = {}  # the truth: consecutive tokens from the first one on
    for _ in range(3000):
        table = rng.sample(range(1, 15), 5)
        stop = rng.randint(1, 20)
        if rng.random() < 0.5:
            begin = blocks.find_begin(table, stop)
            assert begin % 4 == 0
            if begin <= stop:
                assert all(filled.get(table[place // 4], 0) > place % 4 for place in range(begin, stop))
                assert not begin or filled.get(table[begin // 4 - 1], 0) < 4
                count = rng.randint(0, 20 - stop)
                blocks.fill(table, stop, stop + count)
                for place in range(stop, stop + count):
                    filled[table[place // 4]] = max(filled.get(table[place // 4], 0), place % 4 + 1)
            else:
                assert filled.get(table[stop // 4], 0) < stop % 4
        elif rng.random() < 0.7:
            start = rng.randrange(stop)
            blocks.truncate(table, start, stop)
            for place in range(start, stop):
                filled[table[place // 4]] = min(filled.get(table[place // 4], 0), place % 4)
        else:
            block = rng.randint(1, 14)
            pool.num_allocations[block] += 1
            filled.pop(block, None)
        assert {block: blocks.count(block) for block in range(15) if blocks.count(block)} == {
            block: count for block, count in filled.items() if count
        }
