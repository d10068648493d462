"""Cache groups that do not grow with a request: an encoder's, filled once, and states of constant size."""

from __future__ import annotations

import pytest

from quire.core.drafts import Drafts
from quire.core.kv_cache import KVCache
from quire.core.params import SamplingParams
from quire.core.plan import Plan, Sampled
from quire.core.request import Finish, Request, State
from quire.core.scheduler import Scheduler
from quire.core.swap import SwapCosts
from quire.errors import PromptTooLong

pytestmark = pytest.mark.core


def scheduler_of(num_encoder_groups: int = 1, num_state_groups: int = 0, **options) -> Scheduler:
    defaults = {"num_blocks": 40, "block_size": 4, "max_tokens_per_step": 32, "max_requests": 8}
    groups = {"num_encoder_groups": num_encoder_groups, "num_state_groups": num_state_groups}
    return Scheduler(**(defaults | groups | options))


def request_of(name: str, prompt: list[int], num_encoder: int = 0, **options) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=None), encoder_tokens=[7] * num_encoder, **options)


def step(scheduler: Scheduler, token: int = 1) -> Plan:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, Sampled([[token] if num_yields else [] for num_yields in plan.yields]))
    return plan


def test_blocks_for_the_encoder_are_taken_once_and_kept_until_the_end() -> None:
    scheduler = scheduler_of(num_encoder_groups=2)
    request = request_of("a", [1, 2, 3], 9, max_tokens=3)
    scheduler.add(request)
    plan = step(scheduler)
    assert plan.encodes == [request]
    assert [len(table) for table in request.fixed_tables] == [3, 3]
    tables = [list(table) for table in request.fixed_tables]
    assert scheduler.kv.pool.num_free == 40 - 6 - 1
    assert step(scheduler).encodes == []
    assert request.fixed_tables == tables
    step(scheduler)
    assert request.finished
    assert (request.fixed_tables, scheduler.kv.pool.num_free) == ([], 40)


def test_windows_do_not_trim_what_the_encoder_filled() -> None:
    scheduler = scheduler_of(windows=(4,))
    request = request_of("a", list(range(20)), 20, max_tokens=10)
    scheduler.add(request)
    for _ in range(5):
        step(scheduler)
    assert request.tables[0][:4] == [None] * 4
    assert len(request.fixed_tables[0]) == 5


def test_admission_counts_them() -> None:
    scheduler = scheduler_of(num_blocks=10)
    assert scheduler.kv.peak(8, 32) == 2
    assert scheduler.kv.peak(8, 32, 21) == 2 + 6
    first, second = (request_of(name, [1] * 4, 16, max_tokens=4) for name in "ab")
    scheduler.add(first)
    scheduler.add(second)
    step(scheduler)
    assert (first.state, second.state) == (State.RUNNING, State.WAITING)
    with pytest.raises(
        PromptTooLong, match="44 prompt tokens and 4 new ones need 12 blocks of the cache, which has 10"
    ):
        scheduler.add(request_of("c", [1] * 4, 40, max_tokens=4))


def test_requests_share_a_prefix_only_below_the_same_encoder_input() -> None:
    scheduler = scheduler_of()
    prompt = list(range(13))
    for name, num_encoder, num_cached in (("a", 5, 0), ("b", 6, 0), ("c", 5, 12), ("d", 0, 0)):
        request = request_of(name, prompt, num_encoder, max_tokens=1)
        scheduler.add(request)
        assert step(scheduler).encodes == ([request] if num_encoder else [])
        assert request.num_cached == num_cached, name


def test_samples_share_what_the_encoder_filled() -> None:
    scheduler = scheduler_of()
    leader = request_of("a", [1, 2, 3], 9, max_tokens=4)
    fork = request_of("b", [1, 2, 3], 9, max_tokens=4, leader=leader)
    scheduler.add(leader)
    scheduler.add(fork)
    assert step(scheduler).encodes == [leader]
    assert step(scheduler).encodes == []
    assert fork.fixed_tables == leader.fixed_tables
    assert scheduler.kv.pool.refs[leader.fixed_tables[0][0]] == 2
    scheduler.abort("a")
    assert scheduler.kv.pool.refs[fork.fixed_tables[0][0]] == 1


def test_who_shares_what_a_failed_plan_was_to_fill_ends_with_it() -> None:
    scheduler = scheduler_of()
    leader = request_of("a", [1], 9, max_tokens=4)
    fork, other = request_of("b", [1], 9, max_tokens=4, leader=leader), request_of("c", [1], 9, max_tokens=4)
    scheduler.add(leader)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.add(fork)
    scheduler.add(other)
    later = scheduler.schedule()
    assert later is not None
    assert fork.fixed_tables == leader.fixed_tables
    updates = scheduler.fail(plan, "the step failed")
    assert [(update.id, update.finish) for update in updates] == [("a", Finish.ERROR), ("b", Finish.ERROR)]
    assert other.state is State.RUNNING


@pytest.mark.parametrize("groups", [(2, 0), (0, 2), (1, 1)])
@pytest.mark.parametrize("num_host_blocks", [0, 30])
def test_a_preempted_request_has_them_filled_again_or_brought_back(
    groups: tuple[int, int], num_host_blocks: int
) -> None:
    scheduler = scheduler_of(*groups, num_host_blocks=num_host_blocks, costs=SwapCosts(0.0, 1.0), prefix_cache=False)
    request = request_of("a", [1, 2, 3, 4, 5], 9 if groups[0] else 0, max_tokens=6)
    scheduler.add(request)
    step(scheduler)
    before = [block for table in (*request.tables, *request.fixed_tables) for block in table]
    scheduler._preempt(request)
    assert (request.fixed_tables, scheduler.kv.pool.num_free) == ([], 40)
    plan = step(scheduler)
    after = [block for table in (*request.tables, *request.fixed_tables) for block in table]
    assert len(after) == len(before)
    if num_host_blocks:
        sources = {host_block: block for block, host_block in plan.swap_out}
        assert {sources[host_block]: block for host_block, block in plan.swap_in} == dict(
            zip(before, after, strict=True)
        )
        assert (plan.encodes, plan.starts) == ([], [5])
    else:
        assert (plan.swap_in, plan.starts) == ([], [0])
        assert plan.encodes == ([request] if groups[0] else [])


def test_what_the_encoder_read_counts_when_copies_are_weighed() -> None:
    costs = SwapCosts(copy_s=1.0, compute_s=0.3)  # six blocks, or 5 tokens without the encoder's 16
    for num_encoder, swaps in ((0, False), (16, True)):
        scheduler = scheduler_of(num_host_blocks=30, costs=costs)
        scheduler.add(request := request_of("a", [1, 2, 3, 4, 5], num_encoder, max_tokens=6))
        step(scheduler)
        scheduler._preempt(request)
        assert (request.swapped_out is not None) == swaps


def test_states_are_neither_looked_up_nor_forked_nor_drafted() -> None:
    scheduler = scheduler_of(0, 2)
    leader = request_of("a", list(range(9)), max_tokens=6)
    fork = request_of("b", list(range(9)), max_tokens=6, leader=leader)
    scheduler.add(leader)
    scheduler.add(fork)
    step(scheduler)
    leader.drafts = Drafts([4, 5])
    plan = step(scheduler)
    assert leader.drafts is None
    assert (plan.requests, plan.starts, plan.counts) == ([leader, fork], [9, 0], [1, 9])
    assert {*leader.fixed_tables[0], *leader.fixed_tables[1]}.isdisjoint(fork.fixed_tables[0] + fork.fixed_tables[1])
    assert not KVCache(8, 4, num_state_groups=1).prefix_cache


def test_a_reset_leaves_none_behind() -> None:
    scheduler = scheduler_of(1, 1)
    scheduler.add(request := request_of("a", [1, 2, 3], 9, max_tokens=6))
    step(scheduler)
    scheduler.reset()
    assert (request.fixed_tables, scheduler.kv.pool.num_free) == ([], 40)
    assert step(scheduler).encodes == [request]
