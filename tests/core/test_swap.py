"""Preemption by swap, case by case: what goes to the host, when, and what becomes of it. For random traffic see
test_fuzz.py."""

from __future__ import annotations

from operator import itemgetter

import pytest

from quire.core.drafts import Drafts
from quire.core.params import SamplingParams
from quire.core.plan import Plan, Sampled
from quire.core.policy import Policy, Static
from quire.core.request import Finish, Request, State
from quire.core.scheduler import Scheduler
from quire.core.swap import SwapCosts

pytestmark = pytest.mark.core

ALWAYS = (0.0, 1.0)  # seconds to copy a block, to compute a token


def make(
    num_blocks: int = 64,
    *,
    max_tokens: int = 32,
    num_host_blocks: int = 64,
    costs: tuple[float | None, float | None] = ALWAYS,
    **options,
) -> Scheduler:
    options = {"prefix_cache": False, **options}
    return Scheduler(num_blocks, 4, max_tokens, 8, num_host_blocks=num_host_blocks, costs=SwapCosts(*costs), **options)


def ask(name: str, num_prompt: int, max_tokens: int = 12, first: int = 100, **options) -> Request:
    return Request(name, [*range(first, first + num_prompt)], SamplingParams(), max_tokens=max_tokens, **options)


def answer(plan: Plan) -> Sampled:
    return Sampled([[7] if num_yields else [] for num_yields in plan.yields])


def plan_of(scheduler: Scheduler) -> Plan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def step(scheduler: Scheduler) -> Plan:
    plan = plan_of(scheduler)
    scheduler.commit(plan, answer(plan))
    return plan


def test_blocks_go_out_with_the_plan_that_uses_them_and_come_back_to_go_on() -> None:
    scheduler = make(6)
    scheduler.add(ask("first", 8))
    second = ask("second", 7, first=300)
    scheduler.add(second)
    step(scheduler)
    while not second.num_preemptions:
        blocks, num_computed = second.tables[0], second.num_computed
        plan = step(scheduler)
    swapped_out = second.swapped_out
    assert swapped_out is not None
    assert plan.swap_out == list(zip(blocks, swapped_out.tables[0], strict=True))
    assert set(scheduler.requests["first"].tables[0]) & set(blocks), "room was made"
    while second.state is State.WAITING:
        plan = step(scheduler)
    assert [host_block for host_block, _ in plan.swap_in] == swapped_out.tables[0]
    assert [block for _, block in plan.swap_in] == second.tables[0][: len(blocks)]
    assert plan.starts[plan.requests.index(second)] == num_computed
    assert (second.swapped_out, scheduler.swap.num_free) == (None, 64)
    while scheduler.has_work:
        step(scheduler)
    assert second.num_output == 12
    total = sum(request_tokens - 1 for request_tokens in (8 + 12, 7 + 12))
    assert scheduler.counters.computed_tokens == total, "a token was computed twice"
    assert scheduler.counters.swaps == scheduler.counters.preemptions


@pytest.mark.parametrize(
    ("costs", "num_host_blocks", "swaps"),
    [
        (ALWAYS, 64, True),
        (ALWAYS, 2, True),
        (ALWAYS, 1, False),  # two blocks do not fit
        ((4.0, 1.0), 64, False),  # eight seconds for two blocks, eight for eight tokens
        ((3.9, 1.0), 64, True),
        ((None, 1.0), 64, False),
        ((0.0, None), 64, False),
    ],
)
def test_the_cheaper_way_is_taken_if_it_is_known_and_fits(costs, num_host_blocks: int, swaps: bool) -> None:
    scheduler = make(num_host_blocks=num_host_blocks, costs=costs)
    request = ask("a", 8)
    scheduler.add(request)
    step(scheduler)
    scheduler._preempt(request)
    assert (request.swapped_out is not None) == bool(scheduler.counters.swaps) == swaps
    assert len(step(scheduler).swap_out) == (2 if swaps else 0)


def test_with_a_plan_in_flight_blocks_go_out_with_the_plan_after_it() -> None:
    scheduler = make(6)
    first, second = ask("first", 8), ask("second", 7, first=300)
    scheduler.add(first)
    scheduler.add(second)
    in_flight = plan_of(scheduler)
    while (plan := scheduler.schedule()) is not None:
        scheduler.commit(in_flight, answer(in_flight))
        in_flight = plan
    assert second.state is State.PREEMPTED
    blocks = list(second.tables[0])
    scheduler.commit(in_flight, answer(in_flight))
    assert second.swapped_out is not None
    assert [block for block, _ in plan_of(scheduler).swap_out] == blocks


def test_what_is_to_go_out_waits_for_a_plan() -> None:
    scheduler = make(max_tokens=8, policy=Policy(Static(1)))
    request = ask("a", 6)
    scheduler.add(request)
    step(scheduler)
    scheduler._preempt(request)
    scheduler.max_requests = 0  # so that nobody can join
    assert scheduler.schedule() is None
    scheduler.max_requests = 1
    plan = plan_of(scheduler)
    assert [target for _, target in plan.swap_out] == [source for source, _ in plan.swap_in] == [0, 1]


def test_a_request_can_leave_more_than_once() -> None:
    scheduler = make()
    request = ask("a", 6)
    scheduler.add(request)
    for _ in range(3):
        step(scheduler)
        scheduler._preempt(request)
    assert scheduler.counters.swaps == 3
    while scheduler.has_work:
        step(scheduler)
    assert scheduler.counters.computed_tokens == 6 + 12 - 1
    assert scheduler.swap.num_free == 64


def test_a_swapped_out_request_that_ends_frees_its_host_blocks_and_pending_copies() -> None:
    scheduler = make()
    gone, other = ask("gone", 6), ask("other", 6, first=300)
    scheduler.add(gone)
    scheduler.add(other)
    step(scheduler)
    scheduler._preempt(gone)
    assert scheduler.abort("gone") is not None
    assert scheduler.swap.num_free == 64
    blocks = other.tables[0]
    scheduler._preempt(other)
    assert step(scheduler).swap_out == [(blocks[0], 0), (blocks[1], 1)], (
        "the first one's copies would share the host blocks"
    )


def test_a_plan_that_was_not_begun_takes_its_copies_to_the_host_with_it() -> None:
    scheduler = make(6)
    first, second = ask("first", 8), ask("second", 7, first=300)
    scheduler.add(first)
    scheduler.add(second)
    while not second.num_preemptions:
        plan = plan_of(scheduler)
        if not second.num_preemptions:
            scheduler.commit(plan, answer(plan))
    assert plan.swap_out
    (update,) = scheduler.fail(plan, "broken")
    assert (update.id, update.finish) == ("first", Finish.ERROR)
    assert (second.swapped_out, scheduler.swap.num_free) == (None, 64)
    plan = step(scheduler)
    assert (plan.starts, plan.swap_in) == ([0], [])


def test_a_sample_that_can_share_its_leaders_blocks_again_needs_no_copy() -> None:
    scheduler = make()
    leader = ask("a#0", 10)
    fork = ask("a#1", 10, leader=leader)
    scheduler.add(leader)
    scheduler.add(fork)
    step(scheduler)
    plan = plan_of(scheduler)
    scheduler.commit(plan, Sampled([[7], []]))  # the fork's token could not be used yet
    scheduler._preempt(fork)
    assert fork.swapped_out is not None
    plan = step(scheduler)
    assert fork in plan.requests
    assert (plan.swap_in, fork.swapped_out, scheduler.swap.num_free) == ([], None, 64)


def test_blocks_that_are_still_in_the_tree_are_shared_and_the_rest_is_copied() -> None:
    scheduler = make(prefix_cache=True)
    request = ask("a", 10)
    scheduler.add(request)
    step(scheduler)
    blocks = list(request.tables[0])
    scheduler._preempt(request)
    plan = step(scheduler)
    assert len(plan.swap_out) == 3
    assert plan.swap_in == [(2, request.tables[0][2])]
    assert request.tables[0][:2] == blocks[:2]
    assert (plan.starts, plan.counts) == ([10], [1])


def test_what_comes_back_is_published_again() -> None:
    scheduler = make(8, prefix_cache=True)
    request = ask("a", 10)
    scheduler.add(request)
    step(scheduler)
    scheduler._preempt(request)
    for block in scheduler.kv.pool.free_order():
        if block in scheduler.kv.tree.owners:
            scheduler.kv.tree.forget(block, 0)  # as if others had needed the room
    assert len(step(scheduler).swap_in) == 3
    assert [block for block in request.tables[0] if block in scheduler.kv.tree.owners] == request.tables[0][:2]


def test_no_request_is_swapped_in_by_a_plan_that_copies_blocks() -> None:
    """The source of a copy may be free, and what comes from the host is written before copies are made."""
    scheduler = make(prefix_cache=True)
    leader = ask("a#0", 10)
    forks = [ask(f"a#{number}", 10, leader=leader) for number in (1, 2)]
    away = ask("away", 10, first=300)
    for request in (leader, away, *forks):
        scheduler.add(request)
    step(scheduler)
    scheduler._preempt(away)
    assert away.swapped_out is not None
    away.sort_key = (1 << 40, 0)  # behind the forks, which copy the leader's last block
    scheduler._waiting = sorted(((request.sort_key, request) for _, request in scheduler._waiting), key=itemgetter(0))
    plan = step(scheduler)
    assert plan.copies
    assert away.state is State.WAITING
    assert step(scheduler).swap_in


def test_blocks_behind_the_window_stay_away() -> None:
    scheduler = make(windows=(5, None), max_tokens=64)
    request = ask("a", 30, max_tokens=20)
    scheduler.add(request)
    step(scheduler)
    scheduler._preempt(request)
    assert request.swapped_out is not None
    near, whole = request.swapped_out.tables
    assert [host_block is None for host_block in near] == [True] * 6 + [False] * 2
    assert None not in whole
    plan = step(scheduler)
    assert len(plan.swap_in) == 2 + 8
    assert [block is None for block in request.tables[0]] == [True] * 6 + [False] * 2


def test_shared_blocks_behind_the_window_stay_away_too() -> None:
    scheduler = make(windows=(5,), prefix_cache=True)
    request = ask("a", 10)
    scheduler.add(request)
    step(scheduler)
    while request.num_computed < 18:
        step(scheduler)
    scheduler._preempt(request)
    end_of_prompt = scheduler.kv.lookup(ask("b", 10))
    assert len(end_of_prompt.path) == 2, "the prompt is still in the tree"
    scheduler.kv.lookup = lambda _: end_of_prompt  # as if the blocks after it had been needed by others
    plan = step(scheduler)
    assert len(plan.swap_in) == 2
    assert [block is None for block in request.tables[0]] == [True] * 3 + [False] * 2


def test_refused_drafts_do_not_go_to_the_host() -> None:
    scheduler = make()
    request = ask("a", 7)
    scheduler.add(request)
    step(scheduler)
    request.drafts = Drafts([1, 2, 3])
    plan = plan_of(scheduler)
    scheduler.commit(plan, Sampled([[9]]))
    assert len(request.tables[0]) == 3
    scheduler._preempt(request)
    assert request.swapped_out is not None
    assert (request.swapped_out.num_computed, len(request.swapped_out.host_blocks)) == (8, 2)
    assert step(scheduler).starts == [8]
