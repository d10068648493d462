"""A replica that is drained: its requests move to the others with their cache, or are computed again and counted.

The model is tiny and random, and each engine is a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal

import pytest

from quire.config import EngineConfig
from quire.core.params import SamplingParams
from quire.core.request import Finish, Request
from quire.engine.fleet import Fleet, FleetCallbacks
from quire.engine.transfer_messages import Export, ReadBlocks, WriteBlocks
from quire.errors import InvalidParams
from tests.engine.test_fleet import collect, wait_until

pytestmark = pytest.mark.cpu

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 200,
    "max_position_embeddings": 4096, "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "hidden_act": "silu", "eos_token_id": 1, "bos_token_id": 0,
}  # fmt: skip
CONFIG = EngineConfig(
    model="tiny", device="cpu", weights="random", max_len=2048, num_blocks=2000, max_requests=16, speculate="off",
    threads=2, prefix_cache=False,
)  # fmt: skip
MAX_TOKENS = 900  # so that most requests still run when they are to move


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(MODEL))
    return path


def groups(count=8, max_tokens=MAX_TOKENS, **params):
    """Requests with prompts of their own; every third is of two samples."""
    rng = random.Random(5)
    made = []
    for index in range(count):
        prompt = [rng.randrange(2, 200) for _ in range(rng.randrange(20, 60))]
        group = []
        for sample in range(2 if index % 3 == 2 else 1):
            given = SamplingParams(temperature=index % 2 * 0.8, ignore_eos=True, **params)
            request = Request(f"r{index}-{sample}", prompt, given, seed=9 * index + sample, max_tokens=max_tokens)
            request.leader = group[0] if group else None
            group.append(request)
        made.append(group)
    return made


NUM_REQUESTS = sum(map(len, groups()))


class Scene:
    """A fleet, the requests that run on it, and what its replicas have computed."""

    def __init__(self, model, num_replicas):
        self.restarts, self.computed, self.seen = [], {}, []
        callbacks = FleetCallbacks(
            lambda outputs, replica: self.computed.update({replica: outputs.computed_tokens}),
            lambda reason, replica: self.restarts.append(replica),
        )
        self.fleet = Fleet(CONFIG, model, num_replicas, callbacks=callbacks)

    async def submit(self, replica=None, made=None):
        """Begin with requests, all on one replica if that is given, and wait until all have tokens."""
        for other in range(len(self.fleet.members)):
            self.fleet._set_draining(other, replica is not None and other != replica)
        made = groups() if made is None else made
        self.working = [asyncio.ensure_future(collect(self.fleet, group, self.seen)) for group in made]
        wanted = sum(map(len, made))
        await wait_until(lambda: sum(bool(each.output) for each in self.in_flight()) == wanted)
        for other in range(len(self.fleet.members)):
            self.fleet._set_draining(other, False)

    def in_flight(self):
        return [each for member in self.fleet.members for group in member.groups() for each in group]

    async def finish(self):
        return await asyncio.gather(*self.working)

    def kill_at(self, index, kind, victim):
        """Kill a replica when the first question of a kind goes to replica `index`."""
        member = self.fleet.members[index]
        call = member.call

        async def call_and_kill(asked, *arguments):
            if asked is kind:
                member.call = call
                os.kill(self.fleet.members[victim].process_id, signal.SIGKILL)
            return await call(asked, *arguments)

        member.call = call_and_kill


def only_moved(report):
    """Whether all requests that had not ended moved with their cache."""
    return (report.recomputed, report.queued, report.kept) == (0, 0, 0) and 0 < report.moved <= NUM_REQUESTS


def play(model, scenario, num_replicas=2):
    async def main():
        scene = Scene(model, num_replicas)
        await scene.fleet.start()
        try:
            return await scenario(scene)
        finally:
            await scene.fleet.close()

    return asyncio.run(main())


@pytest.fixture(scope="module")
def expected(model):
    """The answers, and the tokens that are computed, when nothing is disturbed."""

    async def scenario(scene):
        await scene.submit(0)
        answers = await scene.finish()
        return answers, sum(scene.computed.values())

    return play(model, scenario)


def test_a_drain_computes_nothing_again_and_changes_no_token(model, expected):
    async def scenario(scene):
        await scene.submit(1)
        report = await scene.fleet.drain(1)
        assert [state["draining"] for state in scene.fleet.describe()] == [False, True]
        assert not scene.fleet.members[1].groups()
        answers = await scene.finish()
        assert all(state["answers"] == state["waiting_prompt_tokens"] == 0 for state in scene.fleet.describe())
        return answers, report, scene

    answers, report, scene = play(model, scenario)
    assert answers == expected[0]
    assert only_moved(report)
    assert report.moved_tokens > 20 * report.moved
    assert report.moved_bytes > 0
    assert not report.reasons
    assert scene.computed[1] < expected[1]
    assert sum(scene.computed.values()) == expected[1], "a token was computed twice"


def test_a_target_with_fewer_rows_keeps_the_caches_until_there_is_room(model, expected):
    """16 rows are all in use there, so the requests wait in its host blocks."""

    async def scenario(scene):
        await scene.submit(0, [[Request(f"x{n}", [5, n], SamplingParams(ignore_eos=True), max_tokens=300)]
                               for n in range(16)])  # fmt: skip
        before = scene.working
        await scene.submit(1)
        report = await scene.fleet.drain(1)
        answers = await scene.finish()
        return answers, report, await asyncio.gather(*before)

    answers, report, _ = play(model, scenario)
    assert answers == expected[0]
    assert only_moved(report)


@pytest.mark.parametrize(
    ("asked", "kind", "victim"), [(1, Export, 1), (1, ReadBlocks, 1), (0, WriteBlocks, 0), (0, WriteBlocks, 1)]
)
def test_an_engine_that_dies_while_requests_move(model, expected, asked, kind, victim):
    """Replica 1 is drained, and it or the other one is killed. What cannot move is computed again."""

    async def scenario(scene):
        await scene.submit(1)
        scene.kill_at(asked, kind, victim)
        report = await scene.fleet.drain(1)
        answers = await scene.finish()
        assert scene.restarts == [victim]
        assert not scene.fleet._owners
        return answers, report

    answers, report = play(model, scenario)
    assert answers == expected[0]
    assert report.recomputed > 0
    assert report.moved + report.recomputed + report.queued <= NUM_REQUESTS
    assert sum(report.reasons.values()) == report.recomputed
    assert any("die" in reason or "not ready" in reason or "not running" in reason for reason in report.reasons)


def test_a_third_replica_takes_what_the_second_cannot(model, expected):
    async def scenario(scene):
        await scene.submit(1)
        scene.kill_at(0, WriteBlocks, 0)
        report = await scene.fleet.drain(1)
        return await scene.finish(), report

    answers, report = play(model, scenario, 3)
    assert answers == expected[0]
    assert only_moved(report)


def test_replicas_of_other_kinds_compute_again(model, expected):
    async def scenario(scene):
        await scene.submit(1)
        scene.fleet._fingerprint = "another"
        report = await scene.fleet.drain(1)
        return await scene.finish(), report

    answers, report = play(model, scenario)
    assert answers == expected[0]
    assert report.moved == 0 < report.recomputed <= NUM_REQUESTS
    assert list(report.reasons) == ["replica 0: the target has another model or another kind of cache"]


def test_requests_that_are_aborted_while_they_move(model):
    async def scenario(scene):
        await scene.submit(1)
        member = scene.fleet.members[0]
        call = member.call

        async def call_and_abort(asked, *arguments):
            if asked is WriteBlocks:
                member.call = call
                for in_flight in scene.in_flight():
                    scene.fleet.abort(in_flight.request.id)
            return await call(asked, *arguments)

        member.call = call_and_abort
        report = await scene.fleet.drain(1)
        ends = [end for _, ends in await scene.finish() for end in ends.values()]
        assert ends.count(Finish.ABORT) > NUM_REQUESTS // 2
        assert (report.moved, report.recomputed) == (0, 0)
        assert [state["answers"] for state in scene.fleet.describe()] == [0, 0]
        late = await collect(scene.fleet, groups(1, 5)[0])
        assert list(late[1].values()) == [Finish.LENGTH]

    play(model, scenario)


@pytest.mark.parametrize(("replica", "kind"), [(1, Export), (0, WriteBlocks)])
def test_a_drain_that_is_cancelled_leaves_no_request_between_two_engines(model, expected, replica, kind):
    """The group that moves arrives; the others stay where they are."""

    async def scenario(scene):
        await scene.submit(1)
        draining, member = asyncio.ensure_future(scene.fleet.drain(1)), scene.fleet.members[replica]
        call = member.call

        async def call_and_cancel(asked, *arguments):
            if asked is kind:
                member.call = call
                draining.cancel()
            return await call(asked, *arguments)

        member.call = call_and_cancel
        with pytest.raises(asyncio.CancelledError):
            await draining
        assert [len(each.groups()) for each in scene.fleet.members] == [1, len(scene.working) - 1]
        async with asyncio.timeout(60):
            return await scene.finish()

    assert play(model, scenario) == expected[0]


def test_a_drained_replica_takes_requests_when_no_other_is_left(model):
    async def fail():
        raise OSError("no process")

    async def scenario(scene):
        await scene.fleet.drain(1)
        scene.fleet.members[0]._spawn = fail
        os.kill(scene.fleet.members[0].process_id, signal.SIGKILL)
        await wait_until(lambda: not scene.fleet.members[0].health())
        assert list((await collect(scene.fleet, groups(1, 5)[0]))[1].values()) == [Finish.LENGTH]
        assert [state["draining"] for state in scene.fleet.describe()] == [False, False]

    play(model, scenario)


def test_who_can_be_drained(model):
    async def scenario(scene):
        fleet = scene.fleet
        for number in (-1, 2):
            with pytest.raises(InvalidParams, match="no replica"):
                await fleet.drain(number)
        assert (await fleet.drain(0)).moved == 0
        assert fleet.health()
        with pytest.raises(InvalidParams, match="only one"):
            await fleet.drain(1)
        made = groups(4, 5)
        await asyncio.gather(*(collect(fleet, group) for group in made))
        assert {fleet._router.receipts[group[0].id].chosen.replica for group in made} == {1}
        fleet.undrain(0)
        await fleet.drain(1)
        os.kill(fleet.members[0].process_id, signal.SIGKILL)
        await wait_until(lambda: not fleet.members[0].health())
        assert not fleet.health()
        waiting = asyncio.ensure_future(collect(fleet, groups(1, 5)[0]))
        await wait_until(lambda: fleet._waiting)
        fleet.undrain(1)
        assert list((await waiting)[1].values()) == [Finish.LENGTH]

    play(model, scenario)
