"""A Ray Serve application. Serve's proxies take the HTTP requests. One replica of the deployment has the application
and its router, and the engines run where Ray places them (`distributed/ray_engines.py`).

    serve run quire.server.ray_serve:build_app model=smollm2:135m replicas=2

Its arguments are the fields of `EngineConfig` and `ServerConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any, get_type_hints

import msgspec

from quire.config import EngineConfig
from quire.errors import EngineError, InvalidParams, show
from quire.server.config import ServerConfig
from quire.server.hosted import open_application
from quire.server.middleware import RequestMiddleware
from quire.store import resolve

# Serve has the socket.
NOT_HERE = ("host", "port", "tls_cert", "tls_key", "ray", "max_header_bytes")


class QuireServer:
    """Runs in a replica of the deployment. Serve awaits `__init__` and calls the methods."""

    async def __init__(self, arguments: Mapping[str, str]) -> None:  # type: ignore[misc]
        engine, config = read_arguments(arguments)
        self._opened = open_application(engine, config, resolve(engine.model).path)
        self._middleware, self._service = await self._opened.__aenter__()

    # Serve's name.
    def __serve_build_asgi_app__(self) -> RequestMiddleware:
        return self._middleware

    async def check_health(self) -> None:
        """Serve starts another replica if this fails."""
        if self._service.client.gone:
            raise EngineError("No engine can be started again; the log says why.")

    async def __del__(self) -> None:
        """Serve awaits it when the replica ends."""
        await self._opened.__aexit__(None, None, None)


def build_app(arguments: Mapping[str, str]) -> Any:
    """The application for `serve run` and for a config file of Ray Serve. Wrong arguments are refused at once."""
    _, config = read_arguments(arguments)
    serve = import_serve()
    deployment = serve.deployment(
        name="quire",
        num_replicas=1,  # it has the router; `replicas` is the number of engines
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=config.max_queue_requests,
        graceful_shutdown_timeout_s=config.drain_timeout,
    )
    return deployment(serve.ingress()(QuireServer)).bind(dict(arguments))


def import_serve() -> Any:
    try:
        return import_module("ray.serve")
    except ImportError:
        raise InvalidParams("Ray Serve is not installed; run pip install 'quire[ray-serve]'.") from None


def read_arguments(arguments: Mapping[str, Any]) -> tuple[EngineConfig, ServerConfig]:
    """`serve run` gives all values as texts."""
    engine_names = {field.name for field in fields(EngineConfig)}
    server_names = {field.name for field in fields(ServerConfig)}.difference(NOT_HERE)
    for name in arguments:
        if name not in engine_names | server_names:
            raise InvalidParams(f"{name} is not an option here. Give {', '.join(sorted(engine_names | server_names))}.")
    engine = EngineConfig.of(
        convert(EngineConfig, {name: arguments[name] for name in arguments if name in engine_names})
    )
    server = convert(ServerConfig, {name: arguments[name] for name in arguments if name in server_names})
    return engine, ServerConfig(ray=True, **server)


def convert(config: type, given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: convert_option(name, value, get_type_hints(config)[name]) for name, value in given.items()}


def convert_option(name: str, value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidParams(f"{name} has a wrong value, {show(str(value))}: {error}.") from None
