"""Copy on write and forks, where the scheduler's own order of events would not bring the case about."""

import pytest

from quire.core.kv_cache import KVCache
from quire.core.params import SamplingParams
from quire.core.plan import Sampled
from quire.core.request import Request, State
from quire.core.scheduler import Scheduler

pytestmark = pytest.mark.core


def running(kv: KVCache, num_prompt: int) -> Request:
    """A request whose prompt is computed and published."""
    request = Request("leader", list(range(num_prompt)), SamplingParams(), max_tokens=8)
    kv.attach_prefix(request, kv.lookup(request), [])
    assert kv.grow(request, num_prompt, [])
    request.tokens.append(99)
    request.num_computed = request.num_planned = num_prompt
    request.state = State.RUNNING
    kv.publish(request, num_prompt)
    return request


def fork(kv: KVCache, leader: Request) -> Request:
    child = Request("fork", leader.prompt, SamplingParams(), max_tokens=8, leader=leader)
    assert kv.fork(child)
    return child


def test_the_leader_too_copies_before_it_writes_what_it_shares() -> None:
    kv = KVCache(16, 4)
    leader = running(kv, 10)
    child = fork(kv, leader)
    assert leader.capacity <= leader.num_planned
    copies: list[tuple[int, int]] = []
    shared = leader.tables[0][2]
    assert kv.grow(leader, 11, copies)
    assert copies == [(shared, leader.tables[0][2])]
    assert child.tables[0][2] == shared
    copies.clear()
    assert kv.grow(child, 10, copies)
    assert copies == []  # nobody else holds it any more


def test_a_published_block_is_not_written_even_by_its_only_holder() -> None:
    kv = KVCache(16, 4)
    leader = running(kv, 8)
    child = fork(kv, leader)
    published = child.tables[0][1]
    kv.release(leader)
    copies: list[tuple[int, int]] = []
    assert kv.grow(child, 8, copies)
    assert copies == [(published, child.tables[0][1])]


def test_growing_takes_nothing_when_there_is_too_little() -> None:
    kv = KVCache(3, 4)
    leader = running(kv, 10)
    free = kv.pool.free_order()
    assert not kv.grow(leader, 13, [])
    assert kv.pool.free_order() == free
    assert len(leader.tables[0]) == 3


def test_beginnings_outlive_ends() -> None:
    kv = KVCache(4, 4)
    leader = running(kv, 12)
    blocks = list(leader.tables[0])
    kv.release(leader)
    assert kv.pool.free_order() == [4, *reversed(blocks)]


def test_a_hit_inside_a_block_keeps_no_block_that_fell_behind_the_window() -> None:
    """The tokens that are copied move the window on; a pool just large enough for a request must do."""
    scheduler = Scheduler(7, 5, 27, 4, windows=(3,))
    assert scheduler.kv.peak(79, 27) == 7
    known = list(range(100, 120))
    for name, prompt in (("a", known), ("b", known[:19] + list(range(200, 260)))):
        scheduler.add(Request(name, prompt, SamplingParams(max_tokens=None), max_tokens=1))
        while scheduler.has_work:
            plan = scheduler.schedule()
            assert plan is not None
            scheduler.commit(plan, Sampled([[1] if num_yields else [] for num_yields in plan.yields]))
    assert scheduler.counters.cached_tokens == 19


def test_a_block_that_is_unpublished_without_references_has_changed():
    """It was cached, and is free."""
    cache = KVCache(8, 4)
    request = Request("r", list(range(9)))
    cache.attach_prefix(request, cache.lookup(request), [])
    assert cache.grow(request, 9, [])
    request.num_planned = request.num_computed = 8
    cache.publish(request, 8)
    (block, *_) = request.tables[0]
    cache.release(request)
    cache.pool.changed = set()
    cache.unpublish({block})
    assert cache.pool.changed == {block}
