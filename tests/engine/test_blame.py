"""Whose fault it was that an engine died: that one is ended after two deaths, and everybody else is served."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quire.config import EngineConfig
from quire.core.params import SamplingParams
from quire.core.request import Finish, Request
from quire.engine import launch, supervisor
from quire.engine.supervisor import EngineCallbacks, Supervised
from tests.engine import scripted_engine as engine

pytestmark = pytest.mark.cpu

GOOD = 9


@pytest.fixture(autouse=True)
def scripted(monkeypatch) -> None:
    monkeypatch.setattr(launch, "ENGINE", ("-m", engine.__name__))


def request(name: str, kind: int, max_tokens: int = 5) -> Request:
    return Request(name, [kind, 10, 11], SamplingParams(max_tokens=max_tokens), max_tokens=max_tokens)


async def collect(client: Supervised, *requests: Request) -> dict[str, tuple[int, Finish | None]]:
    """How many tokens each of some requests that belong together got, and how it ended."""
    tokens, ends = dict.fromkeys((each.id for each in requests), 0), dict[str, Finish]()
    async for updates in client.submit(requests):
        for update in updates:
            tokens[update.id] += len(update.tokens)
            if update.finish:
                ends[update.id] = update.finish
    return {name: (tokens[name], ends.get(name)) for name in tokens}


def serve(*groups: list[Request]) -> tuple[dict[str, tuple[int, Finish | None]], list[str]]:
    async def main() -> tuple[dict[str, tuple[int, Finish | None]], list[str]]:
        restarts: list[str] = []
        client = Supervised(EngineConfig(), Path("none"), callbacks=EngineCallbacks(on_restart=restarts.append))
        await client.start()
        try:
            answers = await asyncio.wait_for(asyncio.gather(*(collect(client, *group) for group in groups)), 120)
        finally:
            await client.close()
        return {name: end for answer in answers for name, end in answer.items()}, restarts

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (engine.RAISE_WHEN_ADDED, "exit status 1"),
        (engine.ABORT_WHEN_ADDED, "signal SIGABRT"),
        (engine.RAISE_IN_STEP, "exit status 1"),
        (engine.RAISE_WHILE_WAITING, "exit status 1"),
    ],
)
def test_a_request_alone_is_ended_after_two_deaths(kind: int, reason: str) -> None:
    answers, restarts = serve([request("bad", kind)])
    assert answers == {"bad": (0, Finish.ERROR)}
    assert restarts == [reason] * 2


@pytest.mark.parametrize("kind", [engine.RAISE_WHEN_ADDED, engine.ABORT_WHEN_ADDED])
def test_who_cannot_be_added_is_found_among_others(kind: int) -> None:
    """The engine announces which requests it adds, so the crash count of other requests stays 0."""
    good = [[request(f"good{index}", GOOD, 2000)] for index in range(3)]
    answers, restarts = serve(*good, [request("bad", kind)])
    assert answers.pop("bad") == (0, Finish.ERROR)
    assert set(answers.values()) == {(2000, Finish.LENGTH)}
    assert len(restarts) == 2


def test_samples_of_one_prompt_are_blamed_together() -> None:
    samples = [request(f"bad#{index}", engine.RAISE_WHEN_ADDED) for index in range(4)]
    answers, restarts = serve(samples, [request("good", GOOD, 2000)])
    assert answers.pop("good") == (2000, Finish.LENGTH)
    assert set(answers.values()) == {(0, Finish.ERROR)}
    assert len(restarts) == 2


@pytest.mark.parametrize("kind", [engine.RAISE_IN_STEP, engine.RAISE_WHILE_WAITING])
def test_a_queue_with_a_culprit_that_nobody_knows_is_served(kind: int) -> None:
    good = [[request(f"good{index}", GOOD)] for index in range(3)]
    answers, restarts = serve(*good, [request("bad", kind)])
    assert answers.pop("bad") == (0, Finish.ERROR)
    assert set(answers.values()) == {(5, Finish.LENGTH)}
    assert len(restarts) <= 4


def test_an_engine_that_does_not_exit_is_killed_and_to_blame_for_it(monkeypatch) -> None:
    monkeypatch.setattr(supervisor, "EXIT_S", 0.3)
    answers, restarts = serve([request("bad", engine.HANG_IN_TEARDOWN)])
    assert answers == {"bad": (0, Finish.ERROR)}
    assert restarts == ["signal SIGKILL"] * 2
