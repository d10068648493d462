"""Prefixes are shared while they are computed: by rows of the same plan and by the plan behind it. A failed plan takes
its readers along."""

from __future__ import annotations

import pytest

from quire.core.kv_cache import KVCache
from quire.core.plan import Plan, Sampled
from quire.core.policy import Policy
from quire.core.request import Finish, Request, State
from quire.core.scheduler import Scheduler
from tests.core.test_scheduler import answer, ask, make, step

pytestmark = pytest.mark.core


def ask_with(name: str, prefix: list[int], *own: int, max_tokens: int = 8, priority: int = 0) -> Request:
    request = ask(name, 1, max_tokens)
    return Request(name, [*prefix, *own], request.params, max_tokens=max_tokens, priority=priority)


def schedule(scheduler: Scheduler) -> Plan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


PREFIX = list(range(100, 120))  # five blocks of four


def test_requests_that_arrive_together_compute_their_prefix_once() -> None:
    scheduler = make(num_blocks=256, max_tokens=200, max_requests=16)
    requests = [ask_with(str(index), PREFIX, index, index + 1) for index in range(16)]
    for request in requests:
        scheduler.add(request)
    plan = schedule(scheduler)
    assert plan.counts == [22, *[2] * 15]
    assert all(request.tables[0][:5] == requests[0].tables[0][:5] for request in requests)
    assert [request.num_cached for request in requests] == [0, *[20] * 15]


def test_a_single_token_is_shared_when_it_is_committed() -> None:
    """A step of single tokens may read what one row has of the cache before another row has stored its token there."""
    scheduler = make(max_tokens=200)
    prefix = PREFIX[:7]
    scheduler.add(ask_with("x", prefix, 1, max_tokens=1))
    plan = schedule(scheduler)
    scheduler.commit(plan, Sampled([[5]]))
    for name, own in (("a", [2]), ("b", [2, 3])):
        scheduler.add(ask_with(name, prefix, *own))
    plan = schedule(scheduler)
    assert (plan.starts, plan.counts) == ([7, 7], [1, 2])
    first, second = plan.requests
    assert first.tables[0][1] != second.tables[0][1]


def test_the_plan_launched_ahead_shares_too() -> None:
    scheduler = make(max_tokens=24)
    first, second = ask_with("a", PREFIX, 1), ask_with("b", PREFIX, 2)
    scheduler.add(first)
    schedule(scheduler)
    scheduler.add(second)
    plan = schedule(scheduler)
    assert dict(zip([request.id for request in plan.requests], plan.starts, strict=True)) == {"a": 21, "b": 20}


def test_a_prefix_that_is_cut_is_shared_as_far_as_it_is_planned() -> None:
    scheduler = make(max_tokens=12)
    scheduler.add(ask_with("a", PREFIX, 1, 2, 3, 4))
    scheduler.add(ask_with("b", PREFIX, 5))
    assert step(scheduler) == {"a": (0, 12)}
    assert step(scheduler) == {"a": (12, 12)}
    assert step(scheduler) == {"a": (24, 1), "b": (20, 1)}


def test_nobody_joins_a_step_without_room() -> None:
    """A look-up that is older than the first token computed would miss what the requests before it publish."""
    scheduler = make(num_blocks=256, max_tokens=16, max_requests=8)
    requests = [ask_with(str(index), PREFIX, index) for index in range(8)]
    for request in requests:
        scheduler.add(request)
    step(scheduler)
    assert [request.state for request in requests] == [State.RUNNING, *[State.WAITING] * 7]
    for _ in range(10):
        step(scheduler)
    assert scheduler.counters.computed_tokens < 20 + 8 + 8 * 11


def test_a_block_that_is_being_filled_is_shared_whole_or_not_at_all() -> None:
    """A copy would be made before the block has its content."""
    scheduler = make(max_tokens=64)
    first, second = ask_with("a", PREFIX, 1), ask_with("b", PREFIX[:14], 2)
    scheduler.add(first)
    scheduler.add(second)
    plan = schedule(scheduler)
    assert plan.copies == []
    assert (plan.starts, plan.counts) == ([0, 12], [21, 3])
    third = ask_with("c", PREFIX[:14], 3)
    scheduler.add(third)
    plan = schedule(scheduler)
    assert len(plan.copies) == 1
    assert plan.starts[plan.requests.index(third)] == 14


def test_a_failed_plan_takes_its_readers_along_and_nobody_else() -> None:
    scheduler = make(max_tokens=64)
    for request in (ask_with("writer", PREFIX, 1), ask_with("reader", PREFIX, 2)):
        scheduler.add(request)
    broken = schedule(scheduler)
    for request in (ask_with("late", PREFIX, 3), ask_with("copying", PREFIX[:3], 4, 5), ask("other", 9, first=900)):
        scheduler.add(request)
    behind = schedule(scheduler)
    assert behind.copies
    updates = scheduler.fail(broken, "broken")
    assert {update.id for update in updates} == {"writer", "reader", "late", "copying"}
    assert all(update.finish is Finish.ERROR for update in updates)
    assert [update.id for update in scheduler.commit(behind, answer(behind))] == ["other"]
    again = ask_with("again", PREFIX, 5)
    scheduler.add(again)
    assert step(scheduler)["again"] == (0, 21)


def test_readers_of_readers_are_found_where_a_window_hides_the_first_writer() -> None:
    """What a failed plan wrote may be behind the window of whoever reads what was computed from it."""
    scheduler = make(block_size=2, max_tokens=12, windows=(3,))
    writer = ask_with("writer", PREFIX, 1)
    scheduler.add(writer)
    broken = schedule(scheduler)
    behind = schedule(scheduler)
    assert (behind.starts, behind.counts) == ([12], [9])
    scheduler.abort("writer")
    reader = ask_with("reader", PREFIX, 2)
    scheduler.add(reader)
    last = schedule(scheduler)
    assert (last.starts, last.counts) == ([20], [1])
    assert not reader.holds_any(broken.computed_blocks([0], 2))
    assert [update.id for update in scheduler.fail(broken, "broken")] == ["reader"]
    scheduler.commit(behind, answer(behind))
    scheduler.commit(last, answer(last))
    assert scheduler.kv.pool.num_free == 64
    assert not scheduler.kv.tree.owners


def test_a_blocked_request_is_looked_up_again_only_if_that_can_help(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make(num_blocks=12, max_tokens=8, max_requests=4)
    scheduler.add(ask_with("a", PREFIX, 1, max_tokens=20))
    scheduler.add(ask("b", 30, first=900))
    looked_up: list[str] = []
    lookup = scheduler.kv.lookup
    monkeypatch.setattr(scheduler.kv, "lookup", lambda request: looked_up.append(request.id) or lookup(request))
    for _ in range(12):
        step(scheduler)
    assert looked_up.count("b") == 1
    while scheduler.has_work:
        step(scheduler)
    assert looked_up.count("b") == 2


def test_a_blocked_request_joins_when_its_prefix_appears() -> None:
    """Another request that goes first brings most of it; then a little room is enough."""
    scheduler = make(num_blocks=14, max_tokens=64, policy=Policy(order="priority"))
    scheduler.add(ask("running", 13, max_tokens=3, first=900))
    prefix = list(range(100, 132))  # eight blocks
    blocked, first = ask_with("blocked", prefix, 1, 2, 3, 4, 5), ask_with("first", prefix, 6)
    blocked.priority = 1
    scheduler.add(blocked)
    assert set(step(scheduler)) == {"running"}
    scheduler.add(first)
    assert set(step(scheduler)) == {"running", "first"}
    assert set(step(scheduler)) == {"running", "first"}
    assert step(scheduler) == {"first": (34, 1), "blocked": (32, 5)}


def test_a_blocked_request_joins_when_others_hold_what_it_shares() -> None:
    """Blocks of its prefix that nobody held are counted as room that it takes, until somebody else holds them."""
    scheduler = make(num_blocks=170, max_tokens=2000, policy=Policy(order="priority"))
    prefix = list(range(1000, 1400))
    scheduler.add(ask_with("warm", prefix, 5, max_tokens=1))
    step(scheduler)
    scheduler.add(ask("holder", 220, max_tokens=15, first=5000))
    step(scheduler)
    scheduler.add(ask_with("blocked", prefix, *range(6000, 6060), max_tokens=2))
    assert "blocked" not in step(scheduler)
    scheduler.add(ask_with("first", prefix[:320], 1, 2, 3, max_tokens=200, priority=-5))
    steps = [set(step(scheduler)) for _ in range(40)]
    ended = next(number for number, rows in enumerate(steps) if "holder" not in rows)
    assert any("blocked" in rows for rows in steps[ended : ended + 2])


def test_where_windows_leave_gaps_a_match_grows_from_below() -> None:
    tree = KVCache(64, 4, (8,)).tree
    root, tokens = tree.root(b""), list(range(100, 140))
    node = root
    nodes = [node := tree.insert(node, tuple(tokens[at : at + 4]), [at // 4 + 1]) for at in range(0, 24, 4)]
    tree.forget(nodes[4].blocks[0] or 0, 1)
    match = tree.lookup(tokens, b"", 39)
    assert len(match.path) == 4
    assert not tree.has_grown(match, b"")
    tree.insert(tree.insert(nodes[5], tuple(tokens[24:28]), [50]), tuple(tokens[28:32]), [51])
    assert tree.has_grown(match, b"")
    assert len(tree.lookup(tokens, b"", 39).path) == 8
