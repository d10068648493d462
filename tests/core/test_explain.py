"""Why requests wait: what is named is all that is missing. It is removed, and the next step admits the request."""

from __future__ import annotations

import random
from collections import Counter
from copy import deepcopy

import pytest

from quire.core.explain import Explainer, Resource, Room, Wait, describe_wait, ordinal
from quire.core.params import SamplingParams
from quire.core.policy import Continuous, Dynamic, Hold, Policy, Static, WaitingRatio
from quire.core.request import Request, State
from quire.core.scheduler import Scheduler
from tests.core.test_fuzz import World

pytestmark = pytest.mark.core

NUM_WORLDS = 60
STEPS_PER_WORLD = 60


def remove(scheduler: Scheduler, resource: Resource, request: Request) -> None:
    """Take a limit away from a copy of a scheduler."""
    match resource:
        case Resource.ROWS:
            scheduler.max_requests += 1000
        case Resource.TOKENS:
            scheduler.max_tokens_per_step += 100_000
            scheduler.pace.target_s = None
        case Resource.BATCHING:
            scheduler.policy = Policy(Continuous(), scheduler.policy.order)
        case Resource.BLOCKS:
            add_blocks(scheduler, 10_000)
        case Resource.ORDER:
            for each in list(scheduler.requests.values()):  # a fork that is held would go first, too
                if each.state is not State.RUNNING and each.sort_key < request.sort_key:
                    scheduler.abort(each.id)


def add_blocks(scheduler: Scheduler, count: int) -> None:
    pool = scheduler.kv.pool
    for block in range(pool.num_blocks + 1, pool.num_blocks + count + 1):
        for column in (pool.refs, pool.num_allocations, pool._next, pool._previous):
            column.append(0)
        pool._link(block, after=0)
    pool.num_blocks += count
    scheduler._blocked = None


def is_admitted(scheduler: Scheduler, request_id: str, now_s: float) -> bool:
    plan = scheduler.schedule(now_s)
    return plan is not None and request_id in {request.id for request in plan.requests}


def play(rng: random.Random) -> World:
    world = World(rng)
    for _ in range(rng.randint(1, STEPS_PER_WORLD)):
        world.play(arrivals=0.3)
    return world


def test_what_is_named_is_what_is_missing() -> None:
    """Of every waiting request: if all that is named is removed, the next step admits it; if one of it stays, not."""
    right, wrong, named = 0, list[str](), Counter[Resource]()
    for seed in range(NUM_WORLDS):
        world = play(random.Random(f"explain {seed}"))
        scheduler, now_s = world.scheduler, world.now_s + 0.5
        explainer = Explainer(scheduler)
        room = explainer.room(now_s)
        waits = explainer.explain(room, 100)
        states = {State.WAITING, State.HELD, State.PREEMPTED}
        assert set(waits) == {each for each in scheduler.requests.values() if each.state in states}
        for request, wait in waits.items():
            assert describe_wait(wait, room).endswith(".")
            named.update(wait.resources)
            if wait.position is None:
                continue
            limits = [resource for resource in wait.resources if resource is not Resource.STEP]
            for kept in (None, *(each for each in limits if each is not Resource.ORDER)):
                copy = deepcopy(scheduler)
                for resource in limits:
                    if resource is not kept:
                        remove(copy, resource, copy.requests[request.id])
                if is_admitted(copy, request.id, now_s) == (kept is None):
                    right += 1
                else:
                    wrong.append(f"{seed} {request.id} {kept} {describe_wait(wait, room)}")
    assert len(wrong) <= 0.01 * right, wrong
    assert set(named) >= {*Resource} - {Resource.PLAN, Resource.TOKENS}  # these two are rare


def waiting(scheduler: Scheduler, prompt: int = 8, **options: object) -> Request:
    number = len(scheduler.requests)
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    request = Request(f"r{number}", [*range(number * 100, number * 100 + prompt)], params, max_tokens=8, **options)  # type: ignore[arg-type]
    scheduler.add(request, 0.0)
    return request


def sentence(scheduler: Scheduler, request: Request, now_s: float = 0.0) -> str:
    explainer = Explainer(scheduler)
    room = explainer.room(now_s)
    return describe_wait(explainer.explain(room, 100)[request], room)


def test_sentences_have_the_numbers() -> None:
    scheduler = Scheduler(num_blocks=100, block_size=4, max_tokens_per_step=32, max_requests=2)
    for _ in range(3):
        last = waiting(scheduler)
    assert sentence(scheduler, last) == "3rd in line: 0 of 2 requests run; the next step admits 2 before it."
    scheduler.schedule()
    assert sentence(scheduler, last) == "First in line: 2 of 2 requests run."
    behind = waiting(scheduler)
    assert sentence(scheduler, behind) == "2nd in line: 2 of 2 requests run; 1 request goes first."


def test_those_before_take_their_share() -> None:
    """Blocks, and places of a batch."""
    scheduler = Scheduler(num_blocks=10, block_size=4, max_tokens_per_step=64, max_requests=4)
    waiting(scheduler, 24)
    assert sentence(scheduler, waiting(scheduler, 20)) == (
        "2nd in line: it needs 5 blocks of the cache, 10 are free, and it may use 3; the next step admits 1 before it."
    )
    scheduler = Scheduler(100, 4, 64, 4, Policy(Static(1)))
    waiting(scheduler)
    assert sentence(scheduler, waiting(scheduler)) == (
        "2nd in line: the batching policy has no place left for it; the next step admits 1 before it."
    )


def test_explaining_changes_nothing() -> None:
    scheduler = Scheduler(100, 4, 64, 4, Policy(WaitingRatio(5.0, 3)))
    waiting(scheduler)
    scheduler.schedule()
    late = waiting(scheduler)
    for _ in range(9):  # each would count a step
        assert "or 3 steps to pass" in sentence(scheduler, late)


def test_missing_blocks_are_counted() -> None:
    scheduler = Scheduler(num_blocks=8, block_size=4, max_tokens_per_step=32, max_requests=4)
    waiting(scheduler, 12)
    scheduler.schedule()
    assert sentence(scheduler, waiting(scheduler, 24)) == (
        "First in line: it needs 6 blocks of the cache, 5 are free (1 for running requests), and it may use 3."
    )


def test_tokens_of_the_step_go_to_running_prompts() -> None:
    scheduler = Scheduler(num_blocks=100, block_size=4, max_tokens_per_step=32, max_requests=4)
    waiting(scheduler, 100)
    scheduler.schedule()
    assert sentence(scheduler, waiting(scheduler)) == (
        "First in line: the next step has no tokens left for it, 32 are for running requests."
    )


def test_forks_wait_for_their_leader() -> None:
    scheduler = Scheduler(num_blocks=100, block_size=4, max_tokens_per_step=32, max_requests=4)
    leader = waiting(scheduler, 20)
    fork = Request("fork", leader.prompt, leader.params, max_tokens=8, leader=leader)
    scheduler.add(fork)
    assert sentence(scheduler, fork) == ("It shares a prompt, of which another answer has 19 tokens left to compute.")


def test_those_that_arrived_later_and_go_first_are_counted() -> None:
    policy = Policy(Static(1), "priority")
    scheduler = Scheduler(100, 4, 32, 1, policy)
    waiting(scheduler)
    scheduler.schedule()
    last = waiting(scheduler, priority=1)
    waiting(scheduler)
    assert sentence(scheduler, last) == (
        "2nd in line: static batching: 1 of the batch before still run; 1 of 1 requests run; 1 request goes first "
        "(it arrived later: by priority, or because the queue is fair between tenants)."
    )


@pytest.mark.parametrize("batching", [Continuous(), Static(2), Dynamic(4, 1.0), WaitingRatio(1.5, 3)])
def test_a_policy_says_why_exactly_when_it_admits_none(batching: Static | Dynamic | WaitingRatio | Continuous) -> None:
    rng, policy, held = random.Random(3), deepcopy(batching), 0
    for _ in range(2000):
        num_waiting, num_running, wait_s = rng.randint(1, 5), rng.randint(0, 4), rng.choice([0.2, 0.9, 1.1])
        hold = policy.explain(num_waiting, num_running, lambda wait_s=wait_s: wait_s)  # type: ignore[misc]
        quota = policy.quota(num_waiting, num_running, lambda wait_s=wait_s: wait_s)  # type: ignore[misc]
        assert bool(hold.reason) == (quota == 0), (num_waiting, num_running, wait_s)
        held += quota == 0
        for _ in range(rng.randint(0, quota)):
            policy.admit()
    assert (held > 100) == (not isinstance(batching, Continuous))


def test_ordinals() -> None:
    assert [ordinal(number) for number in (1, 2, 3, 4, 11, 12, 13, 21, 1002)] == [
        "First", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "1,002nd"
    ]  # fmt: skip


def test_a_sentence_for_every_resource() -> None:
    wait = Wait(position=2, num_blocks=5, num_available_blocks=3, num_rows=4)
    for resource in Resource:
        wait.resources = [resource]
        text = describe_wait(wait, Room(num_running=3, max_requests=4, hold=Hold("a batch runs")))
        assert text.startswith("2nd in line: ")
