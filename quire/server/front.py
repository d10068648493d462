"""Front: what every HTTP request passes before a route sees it: an id, a bound on its body, the key, and a log line.

Plain ASGI, outermost of all. It makes the Context that routes find in the scope.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import MutableMapping
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import BodyTooLarge, NotReady, QuireError, RequestTimeout, Unauthorized
from quire.server.config import ServerConfig
from quire.server.context import Context
from quire.server.keys import Caller, Keys
from quire.server.metrics import Metrics
from quire.server.problems import respond
from quire.server.service import Service
from quire.server.stream import ClientGone

OPEN_PATHS = frozenset({"/health", "/ready"})  # no key needed, nor a model
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

log = logging.getLogger("quire.requests")


class Front:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, config: ServerConfig, keys: Keys, metrics: Metrics) -> None:
        self.app = app
        self.config = config
        self._entry: ASGIApp = self._serve
        if config.cors_origins:
            self._entry = CORSMiddleware(
                self._serve,
                allow_origins=[origin.strip() for origin in config.cors_origins.split(",")],
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
        self.keys = keys
        self.metrics = metrics
        self.service: Service | None = None  # None while the model is being loaded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._entry if scope["type"] == "http" else self.app)(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit = Visit(scope, send, self.config.log_requests, self.metrics)
        try:
            scope["quire"] = self._admit(scope, visit)
            body = await read_body(receive, visit.headers, self.config.max_body_bytes, self.config.read_timeout)
            await self.app(scope, replay(body, receive), visit.send)
        except ClientGone:
            pass
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


async def read_body(receive: Receive, headers: dict[bytes, bytes], max_bytes: int, timeout_s: float) -> bytes:
    """The whole body. It is not read if its announced length is already too large."""
    announced = headers.get(b"content-length", b"0")
    if announced.isdigit() and int(announced) > max_bytes:
        raise too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > max_bytes:
                    raise too_large(max_bytes)
    except TimeoutError:
        raise RequestTimeout(f"The request's body did not arrive within {timeout_s:g} s.") from None
    return bytes(body)


def too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"The request's body has more than {max_bytes:,} bytes, the most this server reads. Send less, or start "
        "it with a larger --max-body-bytes."
    )


def replay(body: bytes, receive: Receive) -> Receive:
    """What the application receives: the body in one message, then what the connection has to say."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_next() -> Message:
        return messages.pop() if messages else await receive()

    return receive_next
