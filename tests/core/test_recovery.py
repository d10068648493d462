"""Errors inside the scheduler itself: one request ends, the others get their answers, and no block is lost."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from quire.core.params import SamplingParams
from quire.core.plan import Detail, Plan, Sampled, TokenLogprobs, Update
from quire.core.request import Finish, Request, State
from quire.core.scheduler import Scheduler
from tests.core.invariants import check
from tests.core.test_fuzz import World
from tests.core.test_scheduler import answer, ask, make, step

pytestmark = pytest.mark.core

# Methods in which the scheduler is in the middle of a change, by where they are.
METHODS = {
    "scheduler": [
        "_add_row",
        "_advance",
        "_finish",
        "_enqueue",
        "_release_blocks",
        "_leave_queue",
        "_preempt",
        "_peek_waiting",
        "_commit_beam",
        "_choose_beams",
        "_replace_beams",
        "_fork_beam",
        "_drop_beams",
    ],
    "kv": [
        "attach_prefix",
        "fork",
        "grow",
        "lookup",
        "publish",
        "publish_planned",
        "release",
        "swap_in",
        "trim",
        "_allocate",
        "share_blocks",
    ],
    "pool": ["allocate", "touch", "release"],
    "tree": ["insert", "prune", "forget", "lookup"],
    "swap": ["swap_out", "drop", "free", "take_swap_out"],
}


class Bug(Exception):
    """An error that is not one of ours."""


def owner(scheduler: Scheduler, component: str) -> Any:
    return {"scheduler": scheduler, "swap": scheduler.swap}.get(component) or getattr(
        scheduler.kv, component, scheduler.kv if component == "kv" else None
    )


class Fault:
    """Makes one method fail, once, before or after it has done its work."""

    def __init__(self, scheduler: Scheduler, rng: random.Random, error: type[BaseException] = Bug) -> None:
        component = rng.choice(list(METHODS))
        self.target, self.name = owner(scheduler, component), rng.choice(METHODS[component])
        self.kind, self.original = type(self.target), getattr(type(self.target), self.name)
        self.is_late, self.num_left, self.error, self.has_struck = rng.random() < 0.5, rng.randint(0, 2), error, False

    def __enter__(self) -> Fault:
        original = self.original

        def failing(target: object, *args: Any, **options: Any) -> Any:
            is_now = target is self.target and not self.has_struck
            self.num_left -= is_now
            strikes = is_now and self.num_left < 0
            if strikes and not self.is_late:
                self.strike()
            result = original(target, *args, **options)
            if strikes:
                self.strike()
            return result

        setattr(self.kind, self.name, failing)
        return self

    def strike(self) -> None:
        self.has_struck = True
        raise self.error(self.name)

    def __exit__(self, *_: object) -> None:
        setattr(self.kind, self.name, self.original)


class BrokenWorld(World):
    """In which some operations fail halfway. The engine does what `Engine.step` does then."""

    num_faults = 0

    def try_step(self, error: type[BaseException]) -> None:
        with Fault(self.scheduler, self.random, error):
            try:
                self.step()
                return
            except Bug as bug:
                self.take(self.scheduler.recover(bug, "a bug"))
            except KeyboardInterrupt:
                self.scheduler.reset()
                self.abort_all()
        self.num_faults += 1
        self.in_flight.clear()
        self.runner.is_broken = False
        self.context = {name: list(request.tokens) for name, request in self.everyone.items()}
        check(self.scheduler, [])

    def abort_all(self) -> None:
        """As `LLM` does after Ctrl-C: what an interrupted step brought is lost, so everything ends."""
        for name in self.everyone:
            self.scheduler.abort(name)
            self.final.setdefault(name, Update(name, [], Finish.ABORT))


@pytest.mark.parametrize("error", [Bug, KeyboardInterrupt])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_fails_the_rest_is_served(seed: int, error: type[BaseException]) -> None:
    num_faults = 0
    for number in range(12):
        world = BrokenWorld(random.Random(f"broken {seed}.{number}"))
        for _ in range(120):
            dice = world.random.random()
            if dice < 0.2:
                world.arrive()
            elif dice < 0.4:
                world.draft()
            if world.random.random() < 0.8:
                world.try_step(error)
            else:
                world.step()
        world.drain()
        world.judge()
        num_faults += world.num_faults
    assert num_faults > 50, "too few faults to show anything"


def fail_in(scheduler: Scheduler, name: str, when: Callable[[Request], bool], patch: pytest.MonkeyPatch) -> None:
    original = getattr(scheduler, name)

    def failing(request: Request, *args: Any) -> Any:
        if when(request):
            raise Bug(name)
        return original(request, *args)

    patch.setattr(scheduler, name, failing)


def run(scheduler: Scheduler) -> dict[str, Finish]:
    """All steps, as an engine runs them; how each request ended."""
    updates: list[Update] = []
    for _ in range(100):
        if not scheduler.has_work:
            break
        try:
            plan = scheduler.schedule()
            if plan is not None:
                updates += scheduler.commit(plan, answer(plan))
        except Bug as error:
            updates += scheduler.recover(error, "a bug")
    ends = [(update.id, update.finish) for update in updates if update.finish]
    assert len(ends) == len(dict(ends)), "two last updates of one request"
    return dict(ends)


@pytest.mark.parametrize("where", ["_allocate", "_advance", "_leave_queue"])
def test_the_request_at_fault_ends_and_no_other(where: str, monkeypatch) -> None:
    scheduler = make()
    for index, name in enumerate("abcd"):
        scheduler.add(ask(name, 9, first=100 * index))
    fail_in(scheduler, where, lambda request: request.id == "b", monkeypatch)
    assert run(scheduler) == {"a": Finish.LENGTH, "b": Finish.ERROR, "c": Finish.LENGTH, "d": Finish.LENGTH}
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks


def test_if_nobody_is_at_fault_the_newest_ends(monkeypatch) -> None:
    scheduler = make()
    for index, name in enumerate("abc"):
        scheduler.add(ask(name, 9, first=100 * index))
    room, errors = scheduler._prompt_budget, [Bug("no room")]

    def failing(num_waiting: int) -> int:
        if errors:
            raise errors.pop()
        return room(num_waiting)

    monkeypatch.setattr(scheduler, "_prompt_budget", failing)
    assert run(scheduler) == {"a": Finish.LENGTH, "b": Finish.LENGTH, "c": Finish.ERROR}


def test_a_request_that_cannot_be_added_leaves_no_trace(monkeypatch) -> None:
    scheduler = make()
    scheduler.add(ask("a", 9))
    step(scheduler)
    with monkeypatch.context() as patch:
        fail_in(scheduler, "_enqueue", lambda request: True, patch)
        with pytest.raises(Bug):
            scheduler.add(ask("b", 9, first=300))
    assert list(scheduler.requests) == ["a"]
    assert run(scheduler) == {"a": Finish.LENGTH}
    scheduler.add(ask("b", 9, first=300))
    assert run(scheduler) == {"b": Finish.LENGTH}


def test_scores_of_a_plan_that_was_lost_are_told_once(monkeypatch) -> None:
    """Rows behind the one that fails are computed again, and then bring their prompt's log probabilities."""
    scheduler = make()
    for index, name in enumerate("ab"):
        prompt = [100 * index + offset for offset in range(5)]
        params = SamplingParams(max_tokens=None, prompt_logprobs=0)
        scheduler.add(Request(name, prompt, params, max_tokens=2))
    fail_in(scheduler, "_advance", lambda request: request.id == "a", monkeypatch)
    told: list[Detail] = []
    for _ in range(3):
        plan = scheduler.schedule()
        if plan is None:
            break
        scored = {row: [TokenLogprobs((1, 0.0, 1), [])] * (4 - start) for row, start in enumerate(plan.starts)}
        try:
            updates = scheduler.commit(plan, Sampled(answer(plan).tokens, prompt_logprobs=scored))
        except Bug as error:
            updates = scheduler.recover(error, "a bug")
        told += [update.detail for update in updates if update.id == "b" and update.detail]
    assert [len(detail.prompt_logprobs) for detail in told if detail.prompt_logprobs] == [4]


class Grammar:
    error = ""

    def __init__(self) -> None:
        self.told: list[int] = []

    def allowed(self) -> bytes:
        return b"\xff"

    def advance(self, token: int) -> None:
        self.told.append(token)

    def copy(self) -> Grammar:
        raise NotImplementedError


def test_a_constraint_is_told_what_its_answer_has_even_if_a_commit_fails(monkeypatch) -> None:
    scheduler, requests = make(), list[Request]()
    for index, name in enumerate("abc"):
        requests.append(ask(name, 9, first=100 * index, constraint=Grammar()))
        scheduler.add(requests[-1])
    fail_in(scheduler, "_advance", lambda request: request.id == "b", monkeypatch)
    assert run(scheduler) == {"a": Finish.LENGTH, "b": Finish.ERROR, "c": Finish.LENGTH}
    for request in requests:
        assert isinstance(request.constraint, Grammar)
        assert request.constraint.told == request.tokens[request.num_prompt :]


def test_an_interrupted_plan_leaves_the_blocks_whole(monkeypatch) -> None:
    scheduler = make()
    scheduler.add(ask("a", 9))
    step(scheduler)
    scheduler.add(ask("b", 9, first=300))
    original = scheduler._add_row

    def interrupted(plan: Plan, request: Request, *args: Any) -> None:
        original(plan, request, *args)
        if request.id == "b":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "_add_row", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scheduler.schedule()
    for name in "ab":
        assert scheduler.abort(name) is not None
    check(scheduler, [])
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks
    assert not scheduler.num_waiting


def test_a_reset_keeps_tokens_and_order() -> None:
    scheduler = make(max_requests=2)
    for index, name in enumerate("abc"):
        scheduler.add(ask(name, 9, first=100 * index))
    step(scheduler)
    tokens = {name: list(request.tokens) for name, request in scheduler.requests.items()}
    scheduler.reset()
    check(scheduler, [])
    assert {name: list(request.tokens) for name, request in scheduler.requests.items()} == tokens
    assert {request.state for request in scheduler.requests.values()} == {State.WAITING}
    assert list(step(scheduler)) == ["a", "b"]
