"""An observer that raises is detached. No request ends by it, nor does the engine."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.core.params import SamplingParams
from quire.core.plan import Update
from quire.core.request import Finish, Request
from quire.engine import process
from quire.engine.engine import Engine
from quire.engine.live_changes import LiveChanges
from quire.engine.memory import CacheSize
from quire.engine.messages import Start, Unwatch, Watch
from quire.engine.observer import Observer
from quire.engine.view import EngineView
from tests.tools.tiny import TinyEngine

pytestmark = pytest.mark.cpu

CALLBACKS = ("on_add", "on_abort", "on_plan", "on_commit", "on_fail", "on_reset")


def make_engine() -> Engine:
    tiny = TinyEngine()
    info = SimpleNamespace(device="cpu", cache=CacheSize(512, 4, 1, 64, 16), max_len=64)
    return Engine(tiny.scheduler, tiny.runner, info)  # type: ignore[arg-type]


def request(name: str) -> Request:
    return Request(name, [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), max_tokens=4)


def run(engine: Engine) -> list[Update]:
    updates: list[Update] = []
    while engine.has_work:
        updates += engine.step()
    return updates


def failing(name: str) -> Observer:
    def fail(*values: object) -> None:
        raise RuntimeError("a bug")

    observer = Observer()
    setattr(observer, name, fail)
    return observer


@pytest.mark.parametrize("name", CALLBACKS)
def test_an_observer_that_fails_is_detached(name: str, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    engine, calls = make_engine(), list[str]()
    follower = Observer()
    for each in CALLBACKS:
        setattr(follower, each, lambda *values, each=each: calls.append(each))
    engine.observers += [failing(name), follower]
    engine.add(request("a"))
    engine.add(request("b"))
    engine.abort("b")
    first = engine.step()
    if name == "on_fail":
        monkeypatch.setattr(engine.runner, "launch", lambda *values, **options: 1 / 0)
    elif name == "on_reset":
        monkeypatch.setattr(engine.scheduler, "schedule", lambda *values: 1 / 0)
    updates = first + engine.step()
    monkeypatch.undo()
    updates += run(engine)
    assert sum(bool(update.finish) for update in updates) == 1
    if name not in ("on_fail", "on_reset"):
        assert [update.finish for update in updates if update.finish] == [Finish.LENGTH]
        assert sum(len(update.tokens) for update in updates) == 4
    assert engine.observers == [follower]
    assert name in calls, "those behind it are called all the same"
    (record,) = [each for each in caplog.records if each.levelno >= logging.ERROR and "detached" in each.message]
    assert "serving goes on" in record.message


def make_loop() -> tuple[process.EngineLoop, list[Any]]:
    sent: list[Any] = []
    link = SimpleNamespace(send=sent.append, closed=False)
    return process.EngineLoop(make_engine(), link, Start(EngineConfig(), "none")), sent  # type: ignore[arg-type]


def report(loop: process.EngineLoop) -> None:
    if loop._view is not None:
        loop._report_changes(loop._view)


def test_a_view_that_fails_is_dropped_and_the_next_watcher_gets_another(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, sent = make_loop()
    engine = loop._engine
    loop._handle(Watch(0.1))
    engine.add(request("a"))
    with monkeypatch.context() as broken:
        broken.setattr(EngineView, "_make_row", lambda *values: 1 / 0)
        report(loop)
        assert loop._view is None
        assert engine.scheduler.kv.pool.changed is None
        loop._handle(Unwatch())
    loop._handle(Watch(0.1))
    report(loop)
    (changes,) = [each for each in sent if isinstance(each, LiveChanges)]
    assert [row.id for row in changes.requests] == ["a"]
    with monkeypatch.context() as broken:
        broken.setattr(EngineView, "on_commit", lambda *values: 1 / 0)
        assert [update.finish for update in run(engine) if update.finish] == [Finish.LENGTH]
    loop._handle(Unwatch())
    with monkeypatch.context() as broken:
        broken.setattr(EngineView, "__init__", lambda *values: 1 / 0)
        loop._handle(Watch(0.1))
        assert loop._view is None
