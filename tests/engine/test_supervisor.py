"""An engine in another process, killed at will: nothing is lost, and nothing comes twice."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import pytest

from quire.config import EngineConfig
from quire.core.params import SamplingParams
from quire.core.request import Finish, Request
from quire.engine.mailbox import Mailbox
from quire.engine.supervisor import EngineCallbacks, InFlightRequest, Supervised
from quire.errors import EngineClosed, EngineError, ModelNotFound, PromptTooLong, QuireError

pytestmark = pytest.mark.model

OPTIONS = {"max_len": 512, "kv_memory": 0.25, "max_requests": 32}


def requests(count, max_tokens=24, **params):
    rng = random.Random(3)
    return [
        Request(
            f"r{index}",
            [rng.randrange(100, 20_000) for _ in range(rng.randrange(3, 90))],
            SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=(index % 2) * 0.9, **params),
            seed=index,
            max_tokens=max_tokens,
        )
        for index in range(count)
    ]


async def collect(client, request, seen=None):
    """All tokens of a request and how it ended."""
    tokens = []
    async for updates in client.submit([request]):
        for update in updates:
            tokens += update.tokens
            if seen is not None:
                seen.append(len(update.tokens))
            if update.finish:
                return tokens, update.finish, update.detail
    raise AssertionError("no final update")


def run(default_model, scenario, stall_s=120.0, **options):
    async def main():
        restarts = []
        client = Supervised(
            EngineConfig(**OPTIONS | options),
            default_model,
            stall_s=stall_s,
            callbacks=EngineCallbacks(on_restart=restarts.append),
        )
        await client.start()
        try:
            return await scenario(client, restarts)
        finally:
            await client.close()

    return asyncio.run(main())


def test_the_engine_says_how_many_requests_run_at_once(default_model):
    """It alone knows the device that this depends on."""

    async def ask(**options):
        client = Supervised(EngineConfig(max_len=512, kv_memory=0.25, device="cpu", **options), default_model)
        try:
            return (await client.start()).max_requests
        finally:
            await client.close()

    assert asyncio.run(ask()) == 64
    assert asyncio.run(ask(max_requests=7)) == 7


def test_answers_are_the_same_when_the_engine_is_killed(default_model):
    async def undisturbed(client, restarts):
        return await asyncio.gather(*(collect(client, request) for request in requests(32)))

    async def disturbed(client, restarts):
        rng, seen = random.Random(11), []
        working = [asyncio.ensure_future(collect(client, request, seen)) for request in requests(32)]
        for _ in range(4):
            wanted = len(seen) + rng.randrange(0, 150)
            while not client.health() or (len(seen) < wanted and not all(each.done() for each in working)):
                await asyncio.sleep(0.002)
            os.kill(client.process_id, signal.SIGKILL)
            while client.health():
                await asyncio.sleep(0.002)
        return await asyncio.gather(*working), restarts

    calm = run(default_model, undisturbed)
    stormy, restarts = run(default_model, disturbed)
    assert len(restarts) == 4
    assert all(reason == "signal SIGKILL" for reason in restarts)
    assert [answer[:2] for answer in stormy] == [answer[:2] for answer in calm]
    assert all(len(tokens) == 24 and finish is Finish.LENGTH for tokens, finish, _ in calm)


def repetitive_requests(count, max_tokens=48):
    """Prompts that repeat themselves, greedy and sampled, with and without log probabilities."""
    rng = random.Random(5)
    made = []
    for index in range(count):
        phrase = [rng.randrange(100, 20_000) for _ in range(rng.randrange(3, 7))]
        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, temperature=(index % 2) * 0.6,
            logprobs=2 if index % 3 == 0 else None, repetition_penalty=1.1 if index % 5 == 4 else 1.0,
        )  # fmt: skip
        made.append(Request(f"r{index}", phrase * 6, params, seed=index, max_tokens=max_tokens))
    return made


async def collect_scored(client, request, seen):
    """Tokens and log probabilities of a request, and how many of its drafts were right in its last engine."""
    tokens, logprobs, num_accepted = [], [], 0
    async for updates in client.submit([request]):
        for update in updates:
            tokens += update.tokens
            seen += update.tokens
            if update.detail is not None:
                logprobs += update.detail.logprobs or []
                num_accepted += update.detail.num_accepted
    return tokens, logprobs, num_accepted


def test_speculation_and_kills_change_no_answer(default_model):
    """Plain decoding without kills, against speculation in an engine that is killed again and again."""

    async def plain(client, restarts):
        return await asyncio.gather(*(collect_scored(client, request, []) for request in repetitive_requests(6)))

    async def killed(client, restarts):
        rng, seen = random.Random(7), []
        working = [asyncio.ensure_future(collect_scored(client, each, seen)) for each in repetitive_requests(6)]
        for _ in range(3):
            wanted = len(seen) + rng.randrange(10, 50)
            while not client.health() or len(seen) < wanted:
                await asyncio.sleep(0.001)
            os.kill(client.process_id, signal.SIGKILL)
            while client.health():
                await asyncio.sleep(0.001)
        return await asyncio.gather(*working), restarts

    calm = run(default_model, plain, speculate="off")
    stormy, restarts = run(default_model, killed)
    assert restarts == ["signal SIGKILL"] * 3
    assert [answer[:2] for answer in stormy] == [answer[:2] for answer in calm]
    assert all(len(tokens) == 48 for tokens, _, _ in calm)
    assert sum(num_accepted for _, _, num_accepted in calm) == 0
    assert sum(num_accepted for _, _, num_accepted in stormy) > 0


def test_an_engine_that_stops_answering_is_replaced(default_model):
    async def scenario(client, restarts):
        seen = []
        working = asyncio.ensure_future(collect(client, requests(1, 40)[0], seen))
        while len(seen) < 5:
            await asyncio.sleep(0.002)
        os.kill(client.process_id, signal.SIGSTOP)
        tokens, finish, _ = await working
        return tokens, finish, restarts

    tokens, finish, restarts = run(default_model, scenario, stall_s=1.0)
    assert (len(tokens), finish, len(restarts)) == (40, Finish.LENGTH, 1)


def test_a_request_that_kills_the_engine_is_ended_and_the_others_go_on(default_model):
    """The culprit: whenever the engine begins it, the engine dies."""

    async def scenario(client, restarts):
        *innocent, culprit = requests(4, 200)
        deliver, scheduled = client._handle, []

        def take(message):
            deliver(message)
            in_flight = client._by_request_id.get(culprit.id)
            if in_flight is not None and in_flight.scheduled:
                scheduled.append(message)
                os.kill(client.process_id, signal.SIGSEGV)

        client._handle = take
        working = [asyncio.ensure_future(collect(client, request)) for request in innocent]
        guilty = await collect(client, culprit)
        client._handle = deliver
        return guilty, await asyncio.gather(*working), restarts

    guilty, others, restarts = run(default_model, scenario)
    assert guilty[1] is Finish.ERROR
    assert "died" in guilty[2].message
    assert all(len(tokens) == 200 and finish is Finish.LENGTH for tokens, finish, _ in others)
    assert 2 <= len(restarts) <= 4


def test_a_suspect_that_is_refused_lets_the_next_one_have_its_turn(default_model):
    async def scenario(client, restarts):
        first, second = requests(2, 6)
        entries = [InFlightRequest(request, Mailbox(), f"suspect{request.id}") for request in (first, second)]
        for in_flight in entries:
            client._in_flight[in_flight.wire_id] = client._by_request_id[in_flight.request.id] = in_flight
        client._quarantined = [entries[1]]
        client._probed = entries[0]
        client._refuse([entries[0].wire_id], PromptTooLong("too long"))
        with pytest.raises(PromptTooLong):
            await entries[0].mailbox.get()
        assert client._probed is entries[1]
        return await entries[1].mailbox.get()

    assert run(default_model, scenario)[0].tokens


def test_an_abandoned_request_is_aborted(default_model):
    async def scenario(client, restarts):
        updates = client.submit(requests(1, 400)[:1])
        await updates.__anext__()
        await updates.aclose()
        assert not client._in_flight
        tokens, finish, _ = await collect(client, Request("r0", [1, 2, 3], SamplingParams(max_tokens=4), max_tokens=4))
        return tokens, finish

    assert run(default_model, scenario)[1] in (Finish.LENGTH, Finish.STOP)


def test_what_the_engine_refuses_is_raised_here(default_model):
    async def scenario(client, restarts):
        with pytest.raises(PromptTooLong):
            await collect(client, Request("long", [1] * 5000, SamplingParams(max_tokens=4), max_tokens=4))
        return await collect(client, requests(1)[0])

    assert run(default_model, scenario, num_blocks=64, kv_memory=None)[1] is Finish.LENGTH


def test_a_model_that_cannot_be_loaded(tmp_path):
    async def main():
        client = Supervised(EngineConfig(model="x"), tmp_path / "missing.gguf")
        try:
            await client.start()
        finally:
            await client.close()

    with pytest.raises((ModelNotFound, QuireError)):
        asyncio.run(main())


def test_an_engine_that_cannot_be_asked_for_is_told_of(default_model, monkeypatch):
    def refuse(message):
        raise OverflowError("a number does not fit")

    monkeypatch.setattr("quire.engine.supervisor.encode", refuse)

    async def main():
        client = Supervised(EngineConfig(**OPTIONS), default_model)
        try:
            await asyncio.wait_for(client.start(), 30)
        finally:
            await client.close()

    with pytest.raises(EngineError, match="could not be started: a number does not fit"):
        asyncio.run(main())


def test_closing_ends_what_is_open(default_model):
    async def scenario(client, restarts):
        working = asyncio.ensure_future(collect(client, requests(1, 400)[0]))
        await asyncio.sleep(0.1)
        await client.close()
        with pytest.raises(EngineClosed):
            await working
        with pytest.raises(EngineClosed):
            await collect(client, requests(2)[1])
        return True

    assert run(default_model, scenario)
