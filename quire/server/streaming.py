"""Responses: JSON, server-sent events, and work that is cancelled when the client disconnects.

Plain ASGI. A slow client delays its own stream only: what is generated meanwhile is added to its answer, in no queue.
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
JSON_LINES = "application/x-ndjson"


def sse_event(document: Any, name: str | None = None) -> bytes:
    """The bytes of one event."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + encode_json(document) + b"\n\n"


class JSONResponse(Response):
    """A JSON document, encoded by msgspec."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content)


class ClientDisconnected(Exception):
    """The client closed the connection before its response was complete."""


class EventStreamResponse(Response):
    """Sends events as they are generated. When the client disconnects, the iterator is closed."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        headers: Mapping[str, str] | None = None,
        *,
        media_type: str = "text/event-stream",
    ) -> None:
        self.events = events
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self.body = b""
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        super().init_headers(headers)
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await with_cancellation(receive, self._send_events(send))
        except ClientDisconnected:
            return

    async def _send_events(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for data in self.events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            await self.events.aclose()  # type: ignore[attr-defined]
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def with_cancellation(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`. If the client disconnects first, cancel it and raise ClientDisconnected."""
    task = asyncio.ensure_future(work)
    listener = asyncio.ensure_future(listen_for_disconnect(receive))
    try:
        await asyncio.wait((task, listener), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        listener.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def listen_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
