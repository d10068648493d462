"""What a view shows is what is there: blocks, owners and requests, at random, through a server's mirror."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest

from quire.core.request import Request, State
from quire.engine.messages import decode_for_server, encode
from quire.engine.view import EngineView
from quire.server.console.lives import Lives
from quire.server.console.mirror import Mirror
from tests.core.test_fuzz import World

pytestmark = pytest.mark.cpu

NUM_WORLDS = 100
STEPS_PER_WORLD = 100  # 10,000 steps in all


class WatchedWorld(World):
    """Random traffic, watched: the scheduler's calls reach the view as the engine's do."""

    def __post_init__(self) -> None:
        super().__post_init__()
        scheduler = self.scheduler
        self.engine: Any = SimpleNamespace(
            scheduler=scheduler,
            observers=[],
            costs=SimpleNamespace(predict=lambda plan: 0.5),
            info=SimpleNamespace(device="cpu"),
        )
        add, abort, schedule, commit, fail = (
            scheduler.add, scheduler.abort, scheduler.schedule, scheduler.commit, scheduler.fail
        )  # fmt: skip

        def tell(name: str, *values: object) -> None:
            for observer in self.engine.observers:
                getattr(observer, name)(*values)

        def watched_add(request: Request, now_s: float = 0.0) -> None:
            add(request, now_s)
            tell("on_add", request, now_s)

        def watched_abort(request_id: str, *options: Any) -> Any:
            update = abort(request_id, *options)
            tell("on_abort", request_id)
            return update

        def watched_schedule(now_s: float = 0.0) -> Any:
            if (plan := schedule(now_s)) is not None:
                tell("on_plan", plan)
            return plan

        def watched_commit(plan: Any, sampled: Any) -> Any:
            updates = commit(plan, sampled)
            tell("on_commit", plan, sampled, updates, 0.0)
            return updates

        def watched_fail(plan: Any, message: str) -> Any:
            updates = fail(plan, message)
            tell("on_fail", plan, updates)
            return updates

        for name, function in {
            "add": watched_add, "abort": watched_abort, "schedule": watched_schedule, "commit": watched_commit,
            "fail": watched_fail,
        }.items():  # fmt: skip
            setattr(scheduler, name, function)


class Reader:
    """A reader of the stream: it knows only the lines."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, int]] = {}
        self.rows: dict[int, dict[str, Any]] = {}
        self.last: dict[str, Any] = {}

    def read(self, line: bytes) -> None:
        document = json.loads(line)
        if document["type"] == "snapshot":
            self.blocks, self.rows = {}, {}
        runs = iter(document["blocks"])
        for first, count, state, owner in zip(runs, runs, runs, runs, strict=True):
            self.blocks.update((block, (state, owner)) for block in range(first, first + count))
        self.rows.update((row["number"], row) for row in document["requests"])
        for ended in document["ended"]:
            self.rows.pop(ended["number"], None)
        self.last = document


def check_reader(reader: Reader, world: World) -> None:
    scheduler = world.scheduler
    pool, published = scheduler.kv.pool, scheduler.kv.tree.owners
    named = [request for plan, _, _ in world.in_flight for request in plan.requests]
    holders: dict[int, set[int]] = {}
    for request in {id(each): each for each in [*scheduler.running, *scheduler.requests.values(), *named]}.values():
        for table in request.all_tables:
            for block in table:
                holders.setdefault(block or 0, set()).add(request.sort_key[1] + 1)
    for block in range(1, pool.num_blocks + 1):
        state, owner = reader.blocks[block]
        refs = pool.refs[block]
        assert state == ((2 if refs == 1 else 3) if refs else 1 if block in published else 0), block
        assert owner in holders[block] if refs else owner == 0, (block, owner)
    live = {request.sort_key[1] + 1: request for request in scheduler.requests.values()}
    assert reader.rows.keys() == live.keys()
    for number, request in live.items():
        row = reader.rows[number]
        assert row["state"] == request.state.value
        assert row["id"] == request.id
        assert row["computed_tokens"] == request.num_computed
        assert row["output_tokens"] == request.num_output
        assert (row["wait"] is None) == (request.state is State.RUNNING)
        if request.beam is None:
            assert row["blocks"] == sum(block is not None for table in request.all_tables for block in table)
    assert reader.last["num_free_blocks"] == pool.num_free
    assert reader.last["num_cached_blocks"] == sum(not pool.refs[block] for block in published)
    assert reader.last["num_running"] == len(scheduler.running)
    assert reader.last["num_waiting"] == scheduler.num_waiting


def read(view: EngineView, mirror: Mirror, lives: Lives, reader: Reader) -> None:
    """From the engine to the reader, as bytes between processes."""
    changes: Any = decode_for_server(encode(view.take_changes())[4:])
    is_snapshot = changes.facts is not None
    for row in [*changes.requests, *(ended.row for ended in changes.ended)]:
        row.id = f"0:{row.id}"
    mirror.apply(changes, {})
    lives.add(changes, 0)
    reader.read(mirror.snapshot(None) if is_snapshot else mirror.deltas[-1].line(None))


def test_blocks_and_requests_are_those_of_the_engine() -> None:
    num_events = dict.fromkeys(["queued", "prompt", "decode", "draft", "preempted", "swapped_out", "swapped_in"], 0)
    for number in range(NUM_WORLDS):
        world = WatchedWorld(random.Random(f"view {number}"))
        for _ in range(world.random.randint(0, 20)):
            world.play()
        view = EngineView(world.engine, 0.0)
        mirror, lives, reader = Mirror(0), Lives(), Reader()
        for _ in range(STEPS_PER_WORLD):
            world.play()
            if world.random.random() < 0.7:
                read(view, mirror, lives, reader)
                check_reader(reader, world)
        late = Reader()
        read(view, mirror, lives, reader)
        late.read(mirror.snapshot(None))
        check_reader(late, world)
        world.drain()
        read(view, mirror, lives, reader)
        assert reader.rows == {}
        for request_id, final in world.final.items():
            for life in lives.find(request_id, None):
                assert life["finish"] == final.finish.value
                assert life["ended_s"] is not None
                for event in life["events"]:
                    num_events[event["kind"]] += 1
        view.detach()
        assert world.engine.observers == []
        assert world.scheduler.kv.pool.changed is None
    assert min(num_events.values()) > 0, num_events


@pytest.mark.parametrize("known_s", [0.25, None])
def test_steps_have_the_seconds_that_the_meter_predicts(known_s: float | None) -> None:
    """Before it can, they have those of the engine's averages."""
    world = WatchedWorld(random.Random("predicted"))
    view = EngineView(world.engine, 0.0, lambda plan: known_s)
    for _ in range(40):
        world.play()
    steps = view.take_changes().steps
    assert steps
    assert {step.predicted_s for step in steps} == {known_s or 0.5}


def test_after_a_reset_there_is_a_snapshot() -> None:
    for number in range(20):
        world = WatchedWorld(random.Random(f"reset {number}"))
        view, mirror, lives, reader = EngineView(world.engine, 0.0), Mirror(0), Lives(), Reader()
        for _ in range(40):
            world.play()
        read(view, mirror, lives, reader)
        while world.in_flight:
            world.land()
        world.scheduler.reset()
        view.on_reset([])
        read(view, mirror, lives, reader)
        assert reader.last["type"] == "snapshot"
        check_reader(reader, world)
