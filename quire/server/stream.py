"""Answers that grow: server-sent events, and work that ends when its client has gone.

Written on ASGI itself: an event is one send, and a client that reads slowly holds up its own stream and nothing else,
since whatever arrives meanwhile is in one place, the growing answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")

encode_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def event(document: Any, name: str | None = None) -> bytes:
    """One event as it goes over the wire."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + encode_json(document) + b"\n\n"


class JSON(Response):
    """A document, encoded once."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content)


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class EventStream(Response):
    """Sends events while they come. When the client goes, the iterator is closed, and with it whatever it runs."""

    def __init__(self, events: AsyncIterator[bytes], headers: Mapping[str, str] | None = None) -> None:
        self.events = events
        self.status_code = 200
        self.background = None
        self.media_type = "text/event-stream"
        self.body = b""
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        super().init_headers(headers)
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._pump(send))
        except ClientGone:
            return

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for data in self.events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            await self.events.aclose()  # type: ignore[attr-defined]
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do the work unless the client disconnects first; then it is cancelled, and ClientGone is raised."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
