"""Front: what every HTTP request passes before a route sees it: an id, a bound on its body, the key, and a log line.

Plain ASGI, outermost of all. It makes the Context that routes find in the scope.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import BodyTooLarge, NotReady, QuireError, Unauthorized
from quire.server.config import ServerConfig
from quire.server.context import Context
from quire.server.keys import Caller, Keys
from quire.server.metrics import Metrics
from quire.server.problems import respond
from quire.server.service import Service

OPEN_PATHS = frozenset({"/health", "/ready"})  # no key needed, nor a model
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

log = logging.getLogger("quire.requests")


class Front:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, config: ServerConfig, keys: Keys, metrics: Metrics) -> None:
        self.app = app
        self.config = config
        self.keys = keys
        self.metrics = metrics
        self.service: Service | None = None  # None while the model is being loaded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        visit = Visit(scope, send, self.config.log_requests, self.metrics)
        body = Body(receive, visit.headers, self.config.max_body_bytes)
        try:
            scope["quire"] = self._admit(scope, visit)
            body.check_length()
            await self.app(scope, body.receive, visit.send)
        except QuireError as error:
            if visit.status is None:
                await respond(error, scope, receive, visit.send)
        except Exception:
            log.exception("request %s failed", visit.request_id)
        finally:
            visit.end()

    def _admit(self, scope: Scope, visit: Visit) -> Context | None:
        if scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return None
        caller = self.keys.find(visit.key())
        if caller is None:
            raise Unauthorized("The API key is missing or wrong; send it as `Authorization: Bearer KEY`.")
        visit.caller = caller
        if self.service is None:
            raise NotReady("The model is being loaded; ask again in a moment.")
        return Context(self.service, caller, visit.request_id)


class Visit:
    """One request from its first byte to its last, for the log and the metrics."""

    def __init__(self, scope: Scope, send: Send, is_logged: bool, metrics: Metrics) -> None:
        self._scope = scope
        self._send = send
        self._is_logged = is_logged
        self._metrics = metrics
        self._begin_s = time.perf_counter()
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.status: int | None = None
        self.caller = Caller()
        wanted = self.headers.get(b"x-request-id", b"").decode("latin-1")
        self.request_id = wanted if REQUEST_ID.fullmatch(wanted) else secrets.token_hex(12)

    def key(self) -> str | None:
        """The API key: a bearer token, or the header that Anthropic's clients use."""
        kind, _, token = self.headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if kind.lower() == "bearer" and token:
            return token.strip()
        return self.headers.get(b"x-api-key", b"").decode("latin-1") or None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = message.setdefault("headers", [])
            if not any(name == b"x-request-id" for name, _ in headers):
                message["headers"] = [*headers, (b"x-request-id", self.request_id.encode())]
        await self._send(message)

    def end(self) -> None:
        route = self._scope.get("route")
        path = getattr(route, "path", "none")
        self._metrics.responses.labels(path, str(self.status or 499)).inc()
        if self._is_logged and self._scope["path"] not in OPEN_PATHS:
            line: MutableMapping[str, Any] = {
                "time": round(time.time(), 3),
                "id": self.request_id,
                "tenant": self.caller.tenant,
                "method": self._scope["method"],
                "path": self._scope["path"],
                "status": self.status or 499,
                "seconds": round(time.perf_counter() - self._begin_s, 4),
            }
            log.info("%s", json.dumps(line))


class Body:
    """Counts a request's bytes while they are read."""

    def __init__(self, receive: Receive, headers: dict[bytes, bytes], most: int) -> None:
        self._receive = receive
        self._announced = headers.get(b"content-length", b"0")
        self._most = most
        self._num_bytes = 0

    def check_length(self) -> None:
        if self._announced.isdigit() and int(self._announced) > self._most:
            raise self._too_large()

    async def receive(self) -> Message:
        message = await self._receive()
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._most:
            raise self._too_large()
        return message

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(
            f"The request's body has more than {self._most:,} bytes, the most this server reads. Send less, or start "
            "it with a larger --max-body-bytes."
        )
