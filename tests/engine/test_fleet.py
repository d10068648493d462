"""Several engines behind one client, killed at will: requests continue elsewhere, and no answer changes."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import pytest

from quire.config import EngineConfig
from quire.core.params import SamplingParams
from quire.core.request import Finish, Request
from quire.core.routing import ReplicaState
from quire.core.structured import StructuredOutputs
from quire.engine import fleet as fleets
from quire.engine.fleet import Fleet, FleetCallbacks, divide, measure_step
from quire.engine.messages import StepOutputs
from quire.engine.supervisor import Supervised
from quire.errors import EngineClosed, EngineError, InvalidParams, ModelNotFound, PromptTooLong, QuireError

pytestmark = pytest.mark.model

CONFIG = EngineConfig(max_len=512, kv_memory=0.25, max_requests=16, device="cpu")
SCHEMA = StructuredOutputs(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


def groups(count, max_tokens=24):
    """Requests with shared beginnings: single ones, samples of one prompt, and structured ones."""
    rng = random.Random(3)
    shared = [rng.randrange(100, 20_000) for _ in range(96)]
    made = []
    for index in range(count):
        prompt = shared[: index % 3 * 48] + [rng.randrange(100, 20_000) for _ in range(rng.randrange(3, 60))]
        structured = SCHEMA if index % 4 == 3 else None
        params = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=structured is None,
            temperature=index % 2 * 0.9,
            structured_outputs=structured,
        )
        group = []
        for sample in range(3 if index % 4 == 2 else 1):
            leader = group[0] if group else None
            group.append(
                Request(
                    f"r{index}-{sample}",
                    prompt,
                    params,
                    seed=100 * index + sample,
                    max_tokens=max_tokens,
                    leader=leader,
                    end_token_ids=frozenset({2}),
                )
            )
        made.append(group)
    return made


async def collect(client, group, seen=None):
    """The tokens of a group's requests, and how each ended."""
    tokens = {request.id: [] for request in group}
    ends = {}
    async for updates in client.submit(group):
        for update in updates:
            tokens[update.id] += update.tokens
            if seen is not None:
                seen.append(len(update.tokens))
            if update.finish:
                ends[update.id] = update.finish
    return tokens, ends


async def collect_all(client, count=16):
    return await asyncio.gather(*(collect(client, group) for group in groups(count)))


@pytest.fixture(scope="module")
def expected(default_model):
    """The answers of one engine that nothing disturbs."""

    async def main():
        client = Supervised(CONFIG, default_model)
        await client.start()
        try:
            return await collect_all(client)
        finally:
            await client.close()

    return asyncio.run(main())


def run(default_model, scenario, num_replicas=2, config=CONFIG):
    async def main():
        restarts = []
        callbacks = FleetCallbacks(on_restart=lambda reason, replica: restarts.append(replica))
        client = Fleet(config, default_model, num_replicas, callbacks=callbacks)
        ready = await client.start()
        try:
            return await scenario(client, ready, restarts)
        finally:
            await client.close()

    return asyncio.run(main())


def kill(client, replica):
    os.kill(client.members[replica].process_id, signal.SIGKILL)


async def wait_until(condition, timeout_s=60):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


def test_replicas_share_the_work_and_change_no_answer(default_model, expected):
    async def scenario(client, ready, restarts):
        assert ready.max_requests == 32
        assert ready.num_blocks == 2 * 512
        answers = await collect_all(client)
        used = {
            int(receipt.split(":")[0].split()[1])
            for index in range(16)
            for receipt in client.receipts(f"r{index}", b"")
        }
        assert used == {0, 1}
        assert not client.receipts("r", b"")
        assert not client.receipts("r1", b"another tenant")
        assert all(state["answers"] == state["waiting_prompt_tokens"] == 0 for state in client.describe())
        assert all(state["cached_blocks"] > 0 for state in client.describe())
        return answers

    assert run(default_model, scenario) == expected


def test_kills_change_no_answer(default_model, expected):
    async def scenario(client, ready, restarts):
        seen = []
        rng = random.Random(5)
        working = [asyncio.ensure_future(collect(client, group, seen)) for group in groups(16)]
        for attempt in range(3):
            wanted = len(seen) + rng.randrange(20, 90)
            await wait_until(lambda least=wanted: len(seen) >= least or all(each.done() for each in working))
            await wait_until(lambda: all(member.health() for member in client.members))
            kill(client, attempt % 2)
            await wait_until(lambda number=attempt: len(restarts) > number)
        return await asyncio.gather(*working), restarts

    answers, restarts = run(default_model, scenario)
    assert restarts == [0, 1, 0]
    assert answers == expected


def test_requests_wait_while_no_replica_is_ready(default_model, expected):
    async def scenario(client, ready, restarts):
        working = [asyncio.ensure_future(collect(client, group)) for group in groups(16)]
        await asyncio.sleep(0.2)
        for replica in range(2):
            kill(client, replica)
        await wait_until(lambda: not client.health())
        late = asyncio.ensure_future(collect(client, groups(17)[16]))
        answers = await asyncio.gather(*working)
        assert list((await late)[1].values()) == [Finish.LENGTH]
        return answers

    assert run(default_model, scenario) == expected


def test_an_abort_reaches_the_replica_that_has_the_request(default_model):
    async def scenario(client, ready, restarts):
        group = groups(1, max_tokens=400)[0]
        seen = []
        working = asyncio.ensure_future(collect(client, group, seen))
        await wait_until(lambda: len(seen) > 3)
        owner = client._owners[group[0].id]
        kill(client, client.members.index(owner))
        await wait_until(lambda: client._owners[group[0].id] is not owner)
        client.abort(group[0].id)
        ends = (await working)[1]
        assert list(ends.values()) == [Finish.ABORT]
        assert not client._owners
        client.abort("never seen")

    run(default_model, scenario)


def test_a_stream_that_is_closed_ends_its_requests(default_model):
    async def scenario(client, ready, restarts):
        stream = client.submit(groups(3, max_tokens=400)[2])
        await anext(stream)
        await stream.aclose()
        assert not client._owners
        assert [state["answers"] for state in client.describe()] == [0, 0]
        with pytest.raises(PromptTooLong):
            await collect(client, [Request("long", [5] * 9000, SamplingParams(), max_tokens=4)])
        assert [state["answers"] for state in client.describe()] == [0, 0]

    run(default_model, scenario)


def test_an_id_that_is_in_use_is_refused(default_model):
    async def scenario(client, ready, restarts):
        group = groups(1, max_tokens=400)[0]
        stream = client.submit(group)
        await anext(stream)
        with pytest.raises(InvalidParams, match="running"):
            await anext(client.submit(group))
        assert group[0].id in client._owners
        await stream.aclose()
        await client.close()
        with pytest.raises(EngineClosed):
            await anext(client.submit(group))

    run(default_model, scenario)


def test_a_model_that_cannot_be_loaded(tmp_path):
    async def main():
        client = Fleet(CONFIG, tmp_path / "none.gguf", 2)
        try:
            with pytest.raises(QuireError) as found:
                await client.start()
            assert isinstance(found.value, ModelNotFound | QuireError)
        finally:
            await client.close()

    asyncio.run(main())


def test_how_a_machine_is_divided(monkeypatch):
    monkeypatch.setattr(fleets, "usable_cores", lambda: 9)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    parts = divide(EngineConfig(device="cpu"), 2)
    assert [part.threads for part, _ in parts] == [4, 4]
    assert parts[0][0].kv_memory == parts[1][0].kv_memory > 0
    assert [launch.environment for _, launch in parts] == [None, None]
    assert [part.threads for part, _ in divide(EngineConfig(device="cpu", threads=2), 3)] == [1, 1, 1]
    assert divide(EngineConfig(device="cpu", kv_memory=0.5), 2)[0][0].kv_memory == 0.5
    monkeypatch.setattr(fleets, "count_devices", lambda: 2)
    parts = divide(EngineConfig(), 2)
    assert [launch.environment["CUDA_VISIBLE_DEVICES"] for _, launch in parts] == ["0", "1"]
    with pytest.raises(InvalidParams, match="2 GPU"):
        divide(EngineConfig(), 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-5")
    assert [launch.environment["CUDA_VISIBLE_DEVICES"] for _, launch in divide(EngineConfig(), 2)] == ["3", "GPU-5"]


def test_samples_of_one_prompt_that_end_apart(default_model):
    """The first sample has ended when the replica dies. The router forgets the others where they end."""

    async def scenario(client, ready, restarts):
        group = groups(3, max_tokens=200)[2]
        group[0].max_tokens = 3
        ended = []

        async def collect_ends():
            async for updates in client.submit(group):
                ended.extend(update.id for update in updates if update.finish)

        working = asyncio.ensure_future(collect_ends())
        await wait_until(lambda: ended)
        kill(client, client.members.index(client._owners[group[1].id]))
        await working
        assert ended[0] == group[0].id
        assert not client._owners
        assert not client._names
        assert not client._router._routed
        assert [(state["answers"], state["waiting_prompt_tokens"]) for state in client.describe()] == [(0, 0)] * 2

    run(default_model, scenario)


def fail_spawn(error):
    async def spawn():
        raise error

    return spawn


async def never():
    await asyncio.Event().wait()


@pytest.mark.parametrize("spawn", [never, fail_spawn(OSError("no process"))])
def test_requests_go_to_the_first_replica_that_is_ready(default_model, expected, spawn):
    """Both die, and one does not come back: the other one answers the requests of both."""

    async def scenario(client, ready, restarts):
        working = [asyncio.ensure_future(collect(client, group)) for group in groups(16)]
        await asyncio.sleep(0.2)
        client.members[0]._spawn = spawn
        for replica in range(2):
            kill(client, replica)
        return await asyncio.gather(*working)

    assert run(default_model, scenario) == expected


def test_requests_fail_when_no_replica_comes_back(default_model):
    async def scenario(client, ready, restarts):
        working = [asyncio.ensure_future(collect(client, group)) for group in groups(6, max_tokens=400)]
        await asyncio.sleep(0.2)
        for replica in range(2):
            client.members[replica]._spawn = fail_spawn(OSError("no process"))
            kill(client, replica)
        ends = await asyncio.gather(*working, return_exceptions=True)
        assert {type(end) for end in ends} == {EngineError}
        assert client.gone
        assert not client._owners

    run(default_model, scenario)


def test_a_request_that_waits_for_a_replica_can_be_aborted(default_model):
    async def scenario(client, ready, restarts):
        for replica in range(2):
            client.members[replica]._spawn = never
            kill(client, replica)
        await wait_until(lambda: len(restarts) == 2)
        group = groups(3)[2]
        working = asyncio.ensure_future(collect(client, group))
        await wait_until(lambda: client._owners)
        for request in group:
            client.abort(request.id)
        assert set((await working)[1].values()) == {Finish.ABORT}
        late = asyncio.ensure_future(collect(client, groups(1)[0]))
        await wait_until(lambda: client._owners)
        await client.close()
        with pytest.raises(EngineClosed):
            await late

    run(default_model, scenario)


def test_a_replica_that_hangs_gets_no_new_requests(default_model, monkeypatch):
    monkeypatch.setattr(fleets, "SILENT_S", 1.5)

    async def scenario(client, ready, restarts):
        os.kill(client.members[0].process_id, signal.SIGSTOP)
        await wait_until(lambda: client.members[0].silent_s > 1.5)
        answers = await asyncio.wait_for(collect_all(client, 6), 30)
        assert all(client._router.receipts[group[0].id].chosen.replica == 1 for group in groups(6))
        os.kill(client.members[0].process_id, signal.SIGKILL)
        return answers

    assert len(run(default_model, scenario)) == 6


def test_a_replica_that_answers_nonsense_is_replaced(default_model, expected):
    """Its requests continue on the other one, which is not blamed."""

    async def main():
        restarts, readers = [], []
        callbacks = FleetCallbacks(on_restart=lambda reason, replica: restarts.append(replica))
        client = Fleet(CONFIG, default_model, 2, callbacks=callbacks)
        spawn = client.members[0]._spawn

        async def spawn_and_keep():
            readers.append(await spawn())
            return readers[-1]

        client.members[0]._spawn = spawn_and_keep
        await client.start()
        try:
            working = asyncio.ensure_future(collect_all(client))
            for attempt, nonsense in enumerate((b"\x05\0\0\0junk!", b"\xff" * 8)):
                await wait_until(lambda: client.members[0].health())
                await asyncio.sleep(0.1)
                readers[-1].feed_data(nonsense)
                await wait_until(lambda least=attempt: len(restarts) > least)
            assert restarts == [0, 0]
            return await working
        finally:
            await client.close()

    assert asyncio.run(main()) == expected


def test_which_steps_are_measured():
    """Rows that end with a step are in it, and verified drafts are no prompts."""
    state = ReplicaState(64, 100)
    guess = state.token_s.value
    first = StepOutputs(num_running=16, computed_tokens=500)
    step = StepOutputs(step_s=0.03, num_running=0, computed_tokens=516)
    measure_step(state, step, first)
    assert state.decode_step_s(16) == 0.03
    drafting = StepOutputs(step_s=0.04, num_running=16, computed_tokens=516 + 16 + 40, drafted={"suffix": 40})
    measure_step(state, drafting, StepOutputs(num_running=16, computed_tokens=516))
    assert state.token_s.value == guess
    prompt = StepOutputs(step_s=0.13, num_running=16, computed_tokens=572 + 116, drafted={"suffix": 40})
    measure_step(state, prompt, drafting)
    assert state.token_s.value == pytest.approx(0.001, rel=0.05)
