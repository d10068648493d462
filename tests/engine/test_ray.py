"""Engines that Ray places, on a local Ray: streams go on when an actor or its process dies, and replicas are drained.

Everything but Ray is tested without it too: an actor is a thread here then.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from concurrent.futures import Future
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from quire.config import EngineConfig
from quire.distributed import ray_engines
from quire.distributed.ray_engines import ACTOR_DIED, Listener, RayLaunch, find_bundle, place_replicas
from quire.engine.fleet import Fleet
from quire.errors import InvalidParams
from tests.engine.test_draining import CONFIG, Scene, expected, model  # noqa: F401  # fixtures
from tests.engine.test_fleet import wait_until

pytestmark = pytest.mark.cpu


class ActorError(Exception):
    """What Ray raises when an actor has died."""


class FakeActor:
    """An actor in this process. Each call of a method runs in a thread, and what it returns can be awaited."""

    def __init__(self, actor_class):
        self._actor = actor_class()
        self._calls: list[Future] = []

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *arguments: self._start(getattr(self._actor, name), arguments))

    def _start(self, method, arguments):
        future: Future = Future()
        self._calls.append(future)
        threading.Thread(target=self._run, args=(future, method, arguments), daemon=True).start()
        return asyncio.wrap_future(future)

    def _run(self, future, method, arguments):
        try:
            result = method(*arguments)
        except Exception as error:
            result = ActorError(f"lost\n{error}")
        if not future.done():
            future.set_exception(result) if isinstance(result, Exception) else future.set_result(result)

    def die(self):
        for future in self._calls:
            if not future.done():
                future.set_exception(ActorError("The actor died."))


class FakeRay:
    """As much of Ray as RayLaunch calls."""

    exceptions = SimpleNamespace(RayError=ActorError)

    def __init__(self, actor_class=ray_engines.EngineActor):
        self.actor_class = actor_class
        self.actors: list[FakeActor] = []

    def remote(self):
        self.actors.append(FakeActor(self.actor_class))
        return self.actors[-1]

    def kill(self, actor):
        if (process := getattr(actor._actor, "_process", None)) is not None:
            process.kill()
        actor.die()


def ray_scene(path, ray=None):
    """A fleet whose engines are started by actors."""
    scene = Scene(path, 2)
    scene.ray = ray or FakeRay()
    places = [(CONFIG, RayLaunch(scene.ray, "127.0.0.1", scene.ray, "tiny", path)) for _ in range(2)]
    scene.fleet = Fleet(CONFIG, path, 2, callbacks=scene.fleet._callbacks, places=places)
    return scene


def play(scenario, make_scene):
    async def main():
        scene = await make_scene()
        await scene.fleet.start()
        try:
            return await scenario(scene)
        finally:
            await scene.fleet.close()

    return asyncio.run(main())


async def kill_one_of_each(scene):
    """Streams on replica 0, whose process is killed, and then on replica 1, whose actor dies."""
    await scene.submit(0)
    os.kill(scene.fleet.members[0].process_id, signal.SIGKILL)
    await wait_until(lambda: scene.restarts == [0])
    await wait_until(scene.fleet.members[0].health)
    scene.end_actor(1)
    await wait_until(lambda: scene.restarts == [0, 1])
    return await scene.finish()


def test_streams_go_on_when_an_actor_dies(model, expected):  # noqa: F811
    async def make_scene():
        scene = ray_scene(model)
        scene.end_actor = lambda index: scene.ray.actors[index].die()
        return scene

    async def scenario(scene):
        answers = await kill_one_of_each(scene)
        assert len(scene.ray.actors) == 4
        return answers

    assert play(scenario, make_scene) == expected[0]


def test_replicas_of_ray_are_drained(model, expected):  # noqa: F811
    async def make_scene():
        return ray_scene(model)

    async def scenario(scene):
        await scene.submit(1)
        report = await scene.fleet.drain(1)
        return await scene.finish(), report

    answers, report = play(scenario, make_scene)
    assert answers == expected[0]
    assert report.recomputed == 0 < report.moved


def test_an_actor_that_cannot_start_is_reported(model):  # noqa: F811
    class Broken:
        def run(self, *_):
            raise RuntimeError("no module named quire")

    async def make_scene():
        return ray_scene(model, FakeRay(Broken))

    with pytest.raises(Exception, match="no module named quire"):
        play(lambda scene: None, make_scene)


def test_a_stranger_is_not_an_engine():
    async def main():
        listener = Listener("127.0.0.1")
        address = await listener.open()
        with socket.create_connection(address) as stranger, socket.create_connection(address) as engine:
            stranger.setblocking(False)
            stranger.send(b"b" * 32)
            assert await asyncio.get_running_loop().sock_recv(stranger, 1) == b"", "it is sent away"
            assert not listener.connected.done()
            engine.send(listener.token)
            (await listener.connected)[1].close()
        listener.close()

    asyncio.run(main())


def test_what_a_replica_needs():
    cpu = EngineConfig(device="cpu", kv_memory=0.5)
    config, bundle = find_bundle(cpu, 4, {"CPU": 9.0})
    assert (config.threads, config.kv_memory, bundle) == (2, 0.5, {"CPU": 2})
    assert find_bundle(EngineConfig(), 2, {"CPU": 9.0, "GPU": 2.0})[1] == {"GPU": 1, "CPU": 1}
    with pytest.raises(InvalidParams, match="2 GPU"):
        find_bundle(EngineConfig(), 3, {"CPU": 9.0, "GPU": 2.0})
    with pytest.raises(InvalidParams, match="need 10 CPUs, but the cluster has 9"):
        find_bundle(EngineConfig(device="cpu", threads=5), 2, {"CPU": 9.0, "GPU": 2.0})
    assert ACTOR_DIED == -signal.SIGKILL


def test_ray_is_asked_for_by_name(monkeypatch):
    def refuse(name):
        raise ImportError(name)

    monkeypatch.setattr(ray_engines, "import_module", refuse)
    with pytest.raises(InvalidParams, match="quire\\[ray\\]"):
        asyncio.run(place_replicas(CONFIG, None, 2))


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install -e '.[ray]'")
@pytest.mark.filterwarnings("ignore")
def test_a_local_ray(model, expected):  # noqa: F811
    import ray

    async def make_scene():
        scene = Scene(model, 2)
        places = await place_replicas(replace(CONFIG, threads=1), model, 2)
        scene.fleet = Fleet(CONFIG, model, 2, callbacks=scene.fleet._callbacks, places=places)
        scene.end_actor = lambda index: ray.kill(places[index][1]._actor)
        return scene

    async def scenario(scene):
        answers = await kill_one_of_each(scene)
        await wait_until(scene.fleet.members[1].health)
        await scene.submit(1)
        report = await scene.fleet.drain(1)
        assert (report.moved > 0, report.recomputed) == (True, 0)
        return answers, await scene.finish()

    before = signal.getsignal(signal.SIGTERM)
    try:
        assert play(scenario, make_scene) == (expected[0], expected[0])
        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        ray.shutdown()
