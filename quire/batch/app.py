"""The server's application without a socket: it answers the requests of this process. `job.py` calls `post`.

The engine is in a process of its own, as a server's is, so a job goes on when the engine dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.errors import EngineError
from quire.server.config import ServerConfig
from quire.server.hosted import open_application
from quire.server.middleware import RequestMiddleware
from quire.server.service import Service

MAX_COUNT = 2**31 - 1
SECONDS = 1e6  # longer than any row runs: the job bounds how many run at once, and nobody waits for one

Message = MutableMapping[str, Any]


class App:
    """A loaded model behind the routes of the server."""

    def __init__(self, middleware: RequestMiddleware, service: Service) -> None:
        self._middleware = middleware
        self._client = service.client
        self.max_requests = service.ready.max_requests
        self.max_len = service.ready.max_len

    async def post(self, path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        """The status and the body of the response. Raises EngineError if there is no engine any more."""
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())],
            "client": None,
            "server": None,
        }
        exchange = Exchange(body)
        await self._middleware(scope, exchange.receive, exchange.send)
        if self._client.gone:
            raise EngineError("The engine could not be started again; the log says why.")
        return exchange.status, b"".join(exchange.body)


class Exchange:
    """One request and its response, as ASGI messages."""

    def __init__(self, body: bytes) -> None:
        self._requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        self.status = 500  # if no response begins
        self.body: list[bytes] = []

    async def receive(self) -> Message:
        if self._requests:
            return self._requests.pop()
        await asyncio.get_running_loop().create_future()  # this client never disconnects
        raise AssertionError

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body.append(message.get("body", b""))


@asynccontextmanager
async def open_app(engine: EngineConfig, path: Path, num_replicas: int = 1, *, ray: bool = False) -> AsyncIterator[App]:
    """Start the engines and load the model. The end of the `with` block ends them."""
    config = ServerConfig(
        request_timeout=SECONDS,
        max_queue_requests=MAX_COUNT,
        max_queue_tokens=MAX_COUNT,
        max_body_bytes=MAX_COUNT,
        log_requests=False,
        replicas=num_replicas,
        ray=ray,
    )
    async with open_application(engine, config, path) as (middleware, service):
        yield App(middleware, service)
