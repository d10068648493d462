"""The options of the Ray Serve application. The application itself was tried on a local Ray Serve."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from quire.errors import EngineError, InvalidParams
from quire.server import ray_serve
from quire.server.ray_serve import QuireServer, build_app, read_arguments

pytestmark = pytest.mark.cpu


def test_options_are_texts_of_numbers_and_switches():
    engine, config = read_arguments({"model": "m", "replicas": "3", "max_len": "512", "kv_memory": "0.5"})
    assert (engine.model, engine.max_len, engine.kv_memory) == ("m", 512, 0.5)
    assert (config.replicas, config.ray) == (3, True)
    assert read_arguments({"log_requests": "false"})[1].log_requests is False


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"thread": "2"}, "thread is not an option here"),
        ({"port": "8000"}, "port is not an option here"),
        ({"threads": "two"}, "threads has a wrong value"),
        ({"replicas": "0"}, "replicas is 0"),
        ({"kv_dtype": "int3"}, "kv_dtype has a wrong value"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(given, words):
    with pytest.raises(InvalidParams, match=words):
        build_app(given)


def test_a_replica_ends_its_engines(monkeypatch):
    """Serve awaits the constructor, takes the application, and awaits `__del__`."""
    events = []
    client = SimpleNamespace(gone=False)

    @asynccontextmanager
    async def opened(engine, config, path):
        events.append((engine.model, config.replicas, path))
        yield "application", SimpleNamespace(client=client)
        events.append("ended")

    monkeypatch.setattr(ray_serve, "open_application", opened)
    monkeypatch.setattr(ray_serve, "resolve", lambda model: SimpleNamespace(path="here"))

    async def main():
        server = SimpleNamespace()  # Python would call `__del__` of a QuireServer too
        await QuireServer.__init__(server, {"model": "m", "replicas": "2"})
        assert QuireServer.__serve_build_asgi_app__(server) == "application"
        await QuireServer.check_health(server)
        client.gone = True
        with pytest.raises(EngineError):
            await QuireServer.check_health(server)
        await QuireServer.__del__(server)

    asyncio.run(main())
    assert events == [("m", 2, "here"), "ended"]
