"""The scheduler's rules, one by one, on cases small enough to follow. For random traffic see test_fuzz.py."""

from __future__ import annotations

import pytest

from quire.core.drafts import Drafts
from quire.core.pace import Pace
from quire.core.params import SamplingParams
from quire.core.plan import Plan, Sampled, TokenLogprobs
from quire.core.policy import Dynamic, Policy, Static, WaitingRatio
from quire.core.prefix_tree import MissKind
from quire.core.request import Finish, Request, State
from quire.core.scheduler import Scheduler
from quire.core.swap import SwapCosts
from quire.errors import EmptyPrompt, InvalidParams, PromptTooLong
from tests.core.fake_runner import FakeRunner

pytestmark = pytest.mark.core


def make(num_blocks=64, block_size=4, max_tokens=32, max_requests=8, **options) -> Scheduler:
    return Scheduler(num_blocks, block_size, max_tokens, max_requests, **options)


def ask(name: str, num_prompt: int, max_tokens: int = 8, first: int = 100, **options) -> Request:
    prompt = [first + index for index in range(num_prompt)]
    return Request(name, prompt, SamplingParams(max_tokens=None), max_tokens=max_tokens, **options)


def answer(plan: Plan, token: int = 7) -> Sampled:
    return Sampled([[token] if num_yields else [] for num_yields in plan.yields])


def step(scheduler: Scheduler, now_s: float = 0.0) -> dict[str, tuple[int, int]]:
    """Run one step; {request: (start, count)} of what it computed."""
    plan = scheduler.schedule(now_s)
    if plan is None:
        return {}
    scheduler.commit(plan, answer(plan))
    return {r.id: (s, c) for r, s, c in zip(plan.requests, plan.starts, plan.counts, strict=True)}


def test_a_prompt_is_computed_in_chunks_and_then_token_by_token() -> None:
    scheduler = make(max_tokens=8)
    scheduler.add(ask("a", 20, max_tokens=3))
    rows = [step(scheduler)["a"] for _ in range(5)]
    assert rows == [(0, 8), (8, 8), (16, 4), (20, 1), (21, 1)]
    assert not scheduler.has_work


def test_a_request_for_no_tokens_computes_its_prompt_and_ends() -> None:
    scheduler = make(max_tokens=8)
    scheduler.add(ask("a", 12, max_tokens=0))
    updates = []
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        scored = {0: [TokenLogprobs((7, -1.0, 1), [])]} if any(plan.yields) else {}
        sampled = Sampled(answer(plan).tokens, logprobs=scored)
        updates += scheduler.commit(plan, sampled)
    (update,) = updates
    assert (update.tokens, update.finish) == ([], Finish.LENGTH)
    assert update.detail.logprobs == []
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks


def test_a_long_prompt_does_not_stall_those_that_run() -> None:
    scheduler = make(max_tokens=8)
    scheduler.add(ask("short", 3))
    step(scheduler)
    scheduler.add(ask("long", 40, first=500))
    for _ in range(4):
        rows = step(scheduler)
        assert rows["short"][1] == 1
        assert rows["long"][1] == 7


def test_every_running_request_gets_a_token_before_anyone_gets_more() -> None:
    scheduler = make(max_tokens=10, max_requests=4)
    for index, name in enumerate("abc"):
        scheduler.add(ask(name, 9, first=100 * index))
    step(scheduler)
    step(scheduler)
    assert all(request.state is State.RUNNING for request in scheduler.requests.values())
    assert set(step(scheduler)) == {"a", "b", "c"}


def test_the_last_in_rank_makes_room_and_comes_back_with_its_tokens() -> None:
    scheduler = make(num_blocks=6, prefix_cache=False)
    scheduler.add(ask("first", 8, max_tokens=12))
    second = ask("second", 7, max_tokens=12, first=300)
    scheduler.add(second)
    while not second.num_preemptions:
        step(scheduler)
    kept = list(second.tokens)
    assert second.state is State.WAITING
    assert not second.tables
    while scheduler.has_work:
        step(scheduler)
    assert second.tokens[: len(kept)] == kept
    assert second.num_output == 12
    assert scheduler.counters.preemptions >= 1


def test_a_shared_prompt_is_computed_once() -> None:
    scheduler = make()
    scheduler.add(ask("a", 20))
    step(scheduler)
    later = ask("b", 20)
    scheduler.add(later)
    assert step(scheduler)["b"] == (19, 1)
    assert later.num_cached == 19
    assert later.miss is None


def test_a_hit_inside_a_block_is_copied_not_shared() -> None:
    scheduler = make()
    first = ask("a", 20)
    scheduler.add(first)
    step(scheduler)
    second = Request("b", [*first.prompt[:14], 1, 2, 3], SamplingParams(), max_tokens=4)
    scheduler.add(second)
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.starts[plan.requests.index(second)] == 14
    assert plan.copies == [(first.tables[0][3], second.tables[0][3])]
    assert second.tables[0][:3] == first.tables[0][:3]
    assert second.miss is not None
    assert (second.miss.kind, second.miss.token) == (MissKind.DIVERGED, 14)


def test_tenants_do_not_share() -> None:
    scheduler = make()
    scheduler.add(ask("a", 20, salt=b"one"))
    step(scheduler)
    other = ask("b", 20, salt=b"two")
    scheduler.add(other)
    assert step(scheduler)["b"] == (0, 20)
    assert other.miss is not None
    assert other.miss.kind is MissKind.SALTED_APART


def test_samples_share_the_prompts_blocks_and_copy_the_one_they_write() -> None:
    scheduler = make(num_blocks=64)
    leader = ask("a#0", 10)
    others = [ask(f"a#{index}", 10, leader=leader) for index in (1, 2)]
    for request in (leader, *others):
        scheduler.add(request)
    assert all(other.state is State.HELD for other in others)
    assert step(scheduler) == {"a#0": (0, 10)}
    plan = scheduler.schedule()
    assert plan is not None
    assert [r.id for r in plan.requests] == ["a#0", "a#1", "a#2"]
    assert plan.counts == [1, 1, 1]
    for other in others:
        assert other.tables[0][:2] == leader.tables[0][:2]
    assert len({request.tables[0][2] for request in (leader, *others)}) == 3
    assert len(plan.copies) == 2


def test_samples_go_on_alone_when_their_leader_is_gone() -> None:
    scheduler = make(max_tokens=8)
    leader, other = ask("a#0", 20), ask("a#1", 20, max_tokens=2)
    other.leader = leader
    scheduler.add(leader)
    scheduler.add(other)
    step(scheduler)
    scheduler.abort("a#0")
    while scheduler.has_work:
        step(scheduler)
    assert other.num_output == 2


def test_blocks_behind_the_window_are_given_back() -> None:
    scheduler = make(block_size=2, max_tokens=4, max_requests=1, windows=(4,), prefix_cache=False)
    request = ask("a", 20, max_tokens=20)
    scheduler.add(request)
    most = 0
    while scheduler.has_work:
        step(scheduler)
        held = sum(block is not None for table in request.tables for block in table)
        most = max(most, held)
    assert most <= scheduler.kv.peak(40, 4) == 5
    assert scheduler.kv.pool.num_free == 64


def test_a_window_lets_requests_in_that_are_longer_than_the_cache() -> None:
    scheduler = make(num_blocks=6, block_size=2, max_tokens=4, max_requests=1, windows=(4,))
    request = ask("a", 30, max_tokens=30)
    scheduler.add(request)
    while scheduler.has_work:
        step(scheduler)
    assert request.num_output == 30


def test_static_batches_run_to_their_end() -> None:
    scheduler = make(policy=Policy(Static(2)))
    for index, length in enumerate((2, 5, 2)):
        scheduler.add(ask(str(index), 40, max_tokens=length, first=1000 * index))
    seen = [set(step(scheduler)) for _ in range(20)]
    last_of_first_batch = max(index for index, rows in enumerate(seen) if "1" in rows)
    assert min(index for index, rows in enumerate(seen) if "2" in rows) > last_of_first_batch
    assert not scheduler.has_work


def test_dynamic_batches_wait_for_company_but_not_for_ever() -> None:
    scheduler = make(policy=Policy(Dynamic(2, max_wait_s=1.0)))
    scheduler.add(ask("a", 4), now_s=0.0)
    assert step(scheduler, 0.5) == {}
    scheduler.add(ask("b", 4, first=300), now_s=0.6)
    assert set(step(scheduler, 0.7)) == {"a", "b"}
    lonely = make(policy=Policy(Dynamic(2, max_wait_s=1.0)))
    lonely.add(ask("a", 4), now_s=0.0)
    assert set(step(lonely, 1.0)) == {"a"}


def test_batching_by_ratio_lets_in_all_who_wait_when_they_are_enough() -> None:
    scheduler = make(num_blocks=1000, max_tokens=40, max_requests=32, policy=Policy(WaitingRatio(0.5, 10)))
    for index in range(10):
        scheduler.add(ask(f"old{index}", 3, max_tokens=100, first=1000 * index))
    step(scheduler)
    for index in range(4):
        scheduler.add(ask(f"new{index}", 20, max_tokens=100, first=20_000 + 1000 * index))
    assert all(len(step(scheduler)) == 10 for _ in range(3)), "four for ten are too few"
    scheduler.add(ask("new4", 20, max_tokens=100, first=30_000))
    joined = [len(step(scheduler)) for _ in range(6)]
    assert joined[0] == 12
    assert joined[4] == 15, "those without room in the first step join the next ones"


def test_batching_by_ratio_lets_nobody_wait_for_ever() -> None:
    scheduler = make(num_blocks=1000, policy=Policy(WaitingRatio(1.0, 5)))
    for index in range(3):
        scheduler.add(ask(f"old{index}", 3, max_tokens=100, first=1000 * index))
    step(scheduler)
    scheduler.add(ask("new", 3, max_tokens=100, first=9000))
    assert ["new" in step(scheduler) for _ in range(7)] == [False] * 5 + [True] * 2


def test_a_batch_whose_members_are_gone_is_not_filled_up() -> None:
    scheduler = make(max_tokens=8, policy=Policy(Static(2)))
    scheduler.add(ask("a", 8, max_tokens=20))
    scheduler.add(ask("b", 8, max_tokens=20, first=500))
    assert set(step(scheduler)) == {"a"}
    scheduler.abort("b")
    step(scheduler)
    scheduler.add(ask("c", 2, max_tokens=20, first=900))
    assert set(step(scheduler)) == {"a"}


def test_batching_policies_give_the_same_answers() -> None:
    answers = []
    for policy in (Policy(), Policy(Static(2)), Policy(Dynamic(3, 0.5))):
        scheduler = make(num_blocks=24, policy=policy, max_requests=4)
        runner = FakeRunner(24, 4, (None,), scheduler.kv)
        requests = [ask(str(index), 5 + index, first=index) for index in range(6)]
        for request in requests:
            scheduler.add(request)
        now_s = 0.0
        while scheduler.has_work:
            now_s += 1.0
            if plan := scheduler.schedule(now_s):
                context = {r.id: list(r.tokens) for r in plan.requests}
                scheduler.commit(plan, runner.run(plan, context))
        answers.append([request.tokens for request in requests])
    assert answers[0] == answers[1] == answers[2]


def test_priority_goes_first_but_nobody_waits_for_ever() -> None:
    scheduler = make(max_requests=1, policy=Policy(order="priority", priority_positions=10))
    scheduler.add(ask("low", 4, max_tokens=1, priority=1))
    scheduler.add(ask("high", 4, max_tokens=1, priority=0))
    assert set(step(scheduler)) == {"high"}
    served = []
    for index in range(40):
        scheduler.add(ask(f"high{index}", 4, max_tokens=1, priority=0))
        served += step(scheduler)
        if "low" in served:
            break
    assert "low" in served
    assert len(served) <= 12


def test_first_come_first_served_ignores_priority() -> None:
    scheduler = make(max_requests=1)
    scheduler.add(ask("a", 4, max_tokens=1, priority=5))
    scheduler.add(ask("b", 4, max_tokens=1, priority=-5))
    assert set(step(scheduler)) == {"a"}


def test_a_step_can_be_planned_before_the_last_ones_tokens_are_known() -> None:
    scheduler = make()
    request = ask("a", 5, max_tokens=4)
    scheduler.add(request)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert first is not None
    assert second is not None
    assert (second.starts, second.counts, second.yields) == ([5], [1], [1])
    assert (request.num_computed, request.num_planned) == (0, 6)
    scheduler.commit(first, answer(first, 1))
    assert (request.num_computed, request.num_planned) == (5, 6)
    scheduler.commit(second, answer(second, 2))
    assert request.tokens[5:] == [1, 2]


def test_blocks_of_an_ended_request_stay_until_the_plan_in_flight_is_committed() -> None:
    scheduler = make()
    scheduler.add(ask("a", 5))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.abort("a")
    assert scheduler.kv.pool.num_free < 64
    assert scheduler.commit(plan, answer(plan)) == []
    assert scheduler.kv.pool.num_free == 64


def test_a_request_that_fills_the_cache_alone_waits_for_its_own_window_to_pass() -> None:
    """With a plan in flight its blocks behind the window are not free yet; giving up would start it over for ever."""
    scheduler = make(num_blocks=5, block_size=2, max_tokens=4, max_requests=1, windows=(4,), prefix_cache=False)
    request = ask("a", 30, max_tokens=4)
    scheduler.add(request)
    in_flight: list[Plan] = []
    for _ in range(200):
        plan = scheduler.schedule()
        if plan is not None:
            in_flight.append(plan)
        if in_flight and (plan is None or len(in_flight) == 2):
            oldest = in_flight.pop(0)
            scheduler.commit(oldest, answer(oldest))
    assert request.num_output == 4
    assert request.num_preemptions == 0


def test_drafts_are_tokens_that_may_be_taken_back() -> None:
    scheduler = make()
    request = ask("a", 5)
    scheduler.add(request)
    step(scheduler)
    request.drafts = Drafts([1, 2, 3])
    plan = scheduler.schedule()
    assert plan is not None
    assert (plan.starts, plan.counts, plan.yields) == ([5], [4], [4])
    scheduler.commit(plan, Sampled([[1, 9]]))
    assert request.tokens[5:] == [7, 1, 9]
    assert request.num_computed == 7
    assert request.drafts is None


def test_what_comes_after_the_end_is_cut_off() -> None:
    scheduler = make()
    request = ask("a", 5, end_token_ids=frozenset([2]))
    scheduler.add(request)
    step(scheduler)
    request.drafts = Drafts([1, 2, 3])
    plan = scheduler.schedule()
    assert plan is not None
    (update,) = scheduler.commit(plan, Sampled([[1, 2, 3, 4]]))
    assert (update.tokens, update.finish) == ([1, 2], Finish.STOP)


def test_requests_that_leave_while_they_wait_do_not_pile_up() -> None:
    scheduler = make(max_requests=1)
    scheduler.add(ask("running", 4, max_tokens=50))
    step(scheduler)
    for index in range(1000):
        scheduler.add(ask(str(index), 4))
        scheduler.abort(str(index))
    scheduler.add(ask("last", 4, max_tokens=1))
    assert len(scheduler._waiting) < 100
    assert scheduler.num_waiting == 1
    while scheduler.has_work:
        step(scheduler)


def test_a_request_ends_once() -> None:
    scheduler = make()
    scheduler.add(ask("a", 5, max_tokens=1))
    plan = scheduler.schedule()
    assert plan is not None
    assert [update.finish for update in scheduler.commit(plan, answer(plan))] == [Finish.LENGTH]
    assert scheduler.abort("a") is None


def test_a_failed_step_ends_its_requests_with_the_reason() -> None:
    scheduler = make()
    scheduler.add(ask("a", 5))
    plan = scheduler.schedule()
    assert plan is not None
    (update,) = scheduler.fail(plan, "broken")
    assert update.finish is Finish.ERROR
    assert update.detail is not None
    assert update.detail.message == "broken"
    assert scheduler.kv.pool.num_free == 64


def test_what_can_never_fit_is_refused_with_numbers() -> None:
    scheduler = make(num_blocks=4)
    with pytest.raises(PromptTooLong, match="10 prompt tokens and 8 new ones need 5 blocks of the cache, which has 4"):
        scheduler.add(ask("a", 10))
    assert not scheduler.has_work


def test_wrong_requests_are_refused() -> None:
    scheduler = make()
    with pytest.raises(EmptyPrompt):
        scheduler.add(ask("a", 0))
    with pytest.raises(InvalidParams, match="priority"):
        scheduler.add(ask("a", 4, priority=1000))
    scheduler.add(ask("a", 4))
    with pytest.raises(InvalidParams, match="id 'a'"):
        scheduler.add(ask("a", 4))


# ── drafts ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_drafts_end_where_the_answer_must() -> None:
    """A row of k drafts brings k + 1 tokens, and the last one's k and v are of no use."""
    scheduler = make()
    request = ask("a", 5, max_tokens=4)
    scheduler.add(request)
    step(scheduler)
    request.drafts = Drafts([7, 7, 7, 7, 7, 7])
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.drafts == {0: Drafts([7, 7])}
    assert (plan.starts, plan.counts, plan.yields) == ([5], [3], [3])
    (update,) = scheduler.commit(plan, Sampled([[7, 7, 7]]))
    assert (update.tokens, update.finish) == ([7, 7, 7], Finish.LENGTH)


def test_a_plan_has_its_own_drafts_and_early_ones_are_dropped() -> None:
    scheduler = make()
    request, other = ask("a", 5), ask("b", 5, first=300)
    scheduler.add(request)
    scheduler.add(other)
    step(scheduler)
    request.drafts = Drafts([1, 2])
    plan = scheduler.schedule()
    assert plan is not None
    request.drafts, other.drafts = Drafts([9]), Drafts([9])  # while a token of each is in flight
    behind = scheduler.schedule()
    assert plan.drafts == {plan.requests.index(request): Drafts([1, 2])}
    assert behind is not None
    assert (behind.requests, behind.drafts, other.drafts) == ([other], {}, None)


def test_drafts_preempt_nobody() -> None:
    """There are blocks for everybody's next token, and none for the drafts."""
    scheduler = make(num_blocks=4, prefix_cache=False)
    first, second = ask("first", 3, max_tokens=10), ask("second", 3, max_tokens=2, first=300)
    for request in (first, second):
        scheduler.add(request)
    step(scheduler)
    first.drafts = Drafts([7] * 9)
    plan = scheduler.schedule()
    assert plan is not None
    assert set(plan.requests) == {first, second}
    assert not scheduler.counters.preemptions
    assert not plan.drafts


def test_drafts_take_blocks_that_nobody_needs() -> None:
    scheduler = make(num_blocks=8, prefix_cache=False)
    first, second = ask("first", 3, max_tokens=20), ask("second", 3, max_tokens=8, first=300)
    for request in (first, second):
        scheduler.add(request)
    step(scheduler)
    first.drafts, second.drafts = Drafts([7] * 16), Drafts([7] * 4)
    plan = scheduler.schedule()
    assert plan is not None
    assert {request.id for request in plan.requests} == {"first", "second"}
    assert {plan.requests[row].id: len(drafts) for row, drafts in plan.drafts.items()} == {"first": 16}
    assert not scheduler.counters.preemptions


def test_blocks_of_drafts_are_given_back_before_somebody_is_preempted() -> None:
    """The first request holds a block more than it will ever need. The second one grows into it."""
    scheduler = make(num_blocks=6, prefix_cache=False)
    first, second = ask("first", 3, max_tokens=9), ask("second", 3, max_tokens=9, first=300)
    for request in (first, second):
        scheduler.add(request)
    step(scheduler)
    scheduler.reserve(first, 16)
    assert len(first.tables[0]) == 4
    while scheduler.has_work:
        step(scheduler)
    assert not scheduler.counters.preemptions
    assert scheduler.kv.pool.num_free == 6


@pytest.mark.parametrize("num_blocks", range(9, 32))
def test_blocks_reserved_for_several_requests_are_those_reserved_one_after_another(num_blocks: int) -> None:
    """And each request still has a block for its next token."""
    found: list[list[int]] = []
    for at_once in (True, False):
        scheduler = make(num_blocks=num_blocks, prefix_cache=False)
        requests = [ask(f"{nth}", 3 + nth, max_tokens=16, first=100 * nth) for nth in range(4)]
        for request in requests:
            scheduler.add(request)
        step(scheduler)
        assert len(scheduler.running) == 4
        wanted = [(request, count) for request, count in zip(requests, (9, 0, 6, 12), strict=True)]
        found.append(scheduler.reserve_all(wanted) if at_once else [scheduler.reserve(*each) for each in wanted])
        for _ in range(2):
            step(scheduler)
            assert len(scheduler.running) == 4
        assert not scheduler.counters.preemptions
    assert found[0] == found[1]
    assert min(found[0]) >= 1


def test_blocks_of_drafts_are_given_back_to_a_request_that_waits() -> None:
    scheduler = make(num_blocks=8, prefix_cache=False)
    first, second = ask("first", 3, max_tokens=9), ask("second", 20, max_tokens=1, first=300)
    scheduler.add(first)
    step(scheduler)
    scheduler.reserve(first, 24)
    scheduler.add(second)
    assert scheduler.kv.pool.num_free < 5
    assert set(step(scheduler)) == {"first", "second"}


def test_blocks_of_drafts_that_are_being_verified_are_kept() -> None:
    scheduler = make(num_blocks=6, prefix_cache=False)
    first, second = ask("first", 3, max_tokens=12), ask("second", 3, max_tokens=9, first=300)
    scheduler.add(first)
    step(scheduler)
    first.drafts = Drafts([7] * 10)
    plan = scheduler.schedule()
    assert plan is not None
    held = list(first.tables[0])
    assert len(held) == 4
    scheduler.add(second)
    behind = scheduler.schedule()
    assert behind is not None
    assert not scheduler._give_back_draft_blocks()
    assert first.tables[0] == held


def ask_to_exit(name: str, num_prompt: int, first: int) -> Request:
    prompt = [first + index for index in range(num_prompt)]
    return Request(name, prompt, SamplingParams(max_tokens=None, early_exit=0.5), max_tokens=30)


def exit_early(scheduler: Scheduler) -> dict[str, tuple[int, int]]:
    """Run one step in which each token of an answer that may exit does."""
    plan = scheduler.schedule()
    assert plan is not None
    exited = {
        row: 0
        for row, (request, start) in enumerate(zip(plan.requests, plan.starts, strict=True))
        if request.params.early_exit is not None and start >= request.num_prompt and plan.yields[row]
    }
    scheduler.commit(plan, Sampled(answer(plan).tokens, exited=exited))
    return {r.id: (s, c) for r, s, c in zip(plan.requests, plan.starts, plan.counts, strict=True)}


def test_tokens_that_exited_are_computed_with_the_next_one() -> None:
    scheduler = make()
    scheduler.add(ask_to_exit("a", 6, 100))
    assert [exit_early(scheduler)["a"] for _ in range(4)] == [(0, 6), (6, 1), (6, 2), (6, 3)]
    assert scheduler.counters.exited_tokens == 3
    assert [step(scheduler)["a"] for _ in range(2)] == [(6, 4), (10, 1)]
    assert exit_early(scheduler)["a"] == (11, 1)
    assert exit_early(scheduler)["a"] == (11, 2)


def test_tokens_that_exited_take_no_part_of_the_budget_for_prompts() -> None:
    """A latency target leaves little for prompts, and all tokens that exited are computed all the same."""
    pace = Pace(0.001, 1, 1.0, 1.0, 3)
    scheduler = make(max_tokens=32, pace=pace)
    for number in range(4):
        scheduler.add(ask_to_exit(f"{number}", 3, 100 * number))
    scheduler.add(ask("plain", 3, max_tokens=30, first=900))
    while not scheduler.requests["plain"].num_output:
        step(scheduler)
    lengths = [[count for _, count in exit_early(scheduler).values()] for _ in range(5)]
    assert lengths == [[number] * 4 + [1] for number in range(1, 6)]
    scheduler.add(ask("late", 9, first=1000))
    assert exit_early(scheduler)["late"] == (0, 3)


@pytest.mark.parametrize("swaps", [False, True])
def test_a_preempted_request_that_may_exit_is_computed_again_within_the_budget(swaps: bool) -> None:
    """Its backlog counts as a prompt's, also where a part of its answer is there already."""
    host = {"num_host_blocks": 64, "costs": SwapCosts(0.0, 1.0)} if swaps else {}
    scheduler = make(max_tokens=32, pace=Pace(0.001, 1, 1.0, 1.0, 3), prefix_cache=False, **host)
    scheduler.add(ask("plain", 3, max_tokens=30, first=900))
    while not scheduler.requests["plain"].num_output:
        step(scheduler)
    scheduler.add(ask_to_exit("exits", 3, 100))
    while scheduler.requests["exits"].num_output < 4:
        step(scheduler)
    lengths = [exit_early(scheduler)["exits"][1] for _ in range(10)]
    assert lengths == list(range(1, 11))
    scheduler._preempt(scheduler.requests["exits"])
    rows = [exit_early(scheduler) for _ in range(3 if swaps else 5)]
    assert [row["exits"] for row in rows] == (
        [(6, 4), (10, 4), (14, 3)] if swaps else [(0, 4), (4, 4), (8, 4), (12, 4), (16, 1)]
    )
    assert all(row["plain"][1] == 1 for row in rows)


def test_a_step_has_no_more_tokens_than_it_may_whatever_has_exited() -> None:
    scheduler = make(max_tokens=10)
    for number in range(4):
        scheduler.add(ask_to_exit(f"{number}", 2, 100 * number))
    for _ in range(9):
        rows = exit_early(scheduler)
        assert sum(count for _, count in rows.values()) <= 10
        assert len(rows) == 4 or not scheduler.running[-1].num_output
    assert all(count >= 1 for _, count in rows.values())
