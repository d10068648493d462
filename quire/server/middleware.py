"""RequestMiddleware: what happens to every HTTP request before its route: request id, API key, body limit, access log.

Plain ASGI, around the application of `app.py`. It makes the `RequestContext` that routes read from the scope.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import BodyTooLarge, NotReady, QuireError, RequestTimeout, Unauthorized
from quire.server.auth import ApiKeys, Tenant
from quire.server.config import ServerConfig
from quire.server.console.page import is_page_file
from quire.server.error_response import error_response
from quire.server.metrics import Metrics
from quire.server.service import RequestContext, Service
from quire.server.streaming import ClientDisconnected

PUBLIC_PATHS = frozenset({"/health", "/ready"})
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

log = logging.getLogger("quire.requests")


class RequestMiddleware:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, config: ServerConfig, keys: ApiKeys, metrics: Metrics) -> None:
        self.app = app
        self.config = config
        self.keys = keys
        self.metrics = metrics
        self.service: Service | None = None  # None while the model is being loaded
        self._handler: ASGIApp = self._handle
        if config.cors_origins:
            self._handler = CORSMiddleware(
                self._handle,
                allow_origins=[origin.strip() for origin in config.cors_origins.split(",")],
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._handler if scope["type"] == "http" else self.app)(scope, receive, send)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        access_log = AccessLog(scope, send, choose_request_id(headers))
        try:
            if not is_public(scope["path"]) and scope["method"] != "OPTIONS":
                access_log.tenant = self._authenticate(headers)
                scope["quire"] = self._make_context(access_log)
            body = await read_body(receive, headers, self.config.max_body_bytes, self.config.read_timeout)
            await self.app(scope, replay(body, receive), access_log.send)
        except ClientDisconnected:
            pass
        except QuireError as error:
            if access_log.status is None:
                await error_response(error, scope["path"])(scope, receive, access_log.send)
        except Exception:
            log.exception("request %s failed", access_log.request_id)
        finally:
            self.metrics.responses.labels(*access_log.labels()).inc()
            if self.config.log_requests and not is_public(scope["path"]):
                log.info("%s", access_log.line())

    def _authenticate(self, headers: dict[bytes, bytes]) -> Tenant:
        tenant = self.keys.authenticate(read_api_key(headers))
        if tenant is None:
            raise Unauthorized("The API key is missing or wrong; send it as `Authorization: Bearer KEY`.")
        return tenant

    def _make_context(self, access_log: AccessLog) -> RequestContext:
        if self.service is None:
            raise NotReady("The model is being loaded; try again in a moment.")
        return RequestContext(self.service, access_log.tenant, access_log.request_id, int(time.time()))


def is_public(path: str) -> bool:
    """Whether a path needs neither a key nor a model, and is not logged."""
    return path in PUBLIC_PATHS or is_page_file(path)


def choose_request_id(headers: dict[bytes, bytes]) -> str:
    """The id that the client sends, if it can be used, or a new one."""
    sent = headers.get(b"x-request-id", b"").decode("latin-1")
    return sent if REQUEST_ID.fullmatch(sent) else secrets.token_hex(12)


def read_api_key(headers: dict[bytes, bytes]) -> str | None:
    """The API key: a bearer token, or the header that Anthropic's clients use."""
    kind, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if kind.lower() == "bearer" and token:
        return token.strip()
    return headers.get(b"x-api-key", b"").decode("latin-1") or None


class AccessLog:
    """The log line of one request. Its `send` records the status, and adds the request id to the response's headers."""

    def __init__(self, scope: Scope, send: Send, request_id: str) -> None:
        self.request_id = request_id
        self.tenant = Tenant()
        self.status: int | None = None  # None: the client disconnected before a response began
        self._scope = scope
        self._send = send
        self._begin_s = time.perf_counter()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode())]
            message["headers"] = headers
        try:
            await self._send(message)
        except RuntimeError as error:
            if "closed" not in str(error):  # uvloop's error for a transport that the client has closed
                raise
            raise ClientDisconnected from error

    def labels(self) -> tuple[str, str]:
        """The route and the status, for the metrics."""
        return getattr(self._scope.get("route"), "path", "none"), str(self.status or 499)

    def line(self) -> str:
        return json.dumps(
            {
                "time": round(time.time(), 3),
                "id": self.request_id,
                "tenant": self.tenant.name,
                "method": self._scope["method"],
                "path": self._scope["path"],
                "status": self.status or 499,
                "seconds": round(time.perf_counter() - self._begin_s, 4),
            }
        )


async def read_body(receive: Receive, headers: dict[bytes, bytes], max_bytes: int, timeout_s: float) -> bytes:
    """The whole body. A body whose content-length is too large is not read."""
    content_length = headers.get(b"content-length", b"0")
    if content_length.isdigit() and int(content_length) > max_bytes:
        raise too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
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
    """The `receive` of the application: the body in one message, then the messages of the connection."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_next() -> Message:
        return messages.pop() if messages else await receive()

    return receive_next
