"""Connections to the server under test: opened as needed, used again, one request at a time on each.

Arrival is stamped when the event loop hands over the bytes, before anything is parsed. What the bytes mean is for the
caller (`asking.py`).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from time import perf_counter
from typing import cast

from quire.bench.wire import BadResponse, ResponseReader, Target

# Shorter than servers keep an idle connection, so that none is closed from there while a request is on its way.
IDLE_S = 1.0

Take = Callable[[ResponseReader, bytes, float], None]


class Failure(Exception):
    """Why a request brought no whole answer: a kind to count by, and what happened in words."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class Unanswered(Failure):
    """The connection ended before the first byte of a response."""

    def __init__(self, detail: str) -> None:
        super().__init__("connection", detail)


class Connection(asyncio.Protocol):
    """One socket. `exchange` sends a request and hands on the body of the response piece by piece."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reader = ResponseReader()
        self._take: Take | None = None
        self._ended: asyncio.Future[None] | None = None
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, request: bytes, take: Take) -> ResponseReader:
        """Returns when the response is complete; `take` may raise a Failure to end it. Not usable after an error."""
        assert self._transport is not None
        assert self._ended is None
        self._reader, self._take = ResponseReader(), take
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._ended
        except BaseException:
            self.abort()
            raise
        finally:
            self._take = self._ended = None
        if not self._reader.keep_alive:
            self.abort()
        return self._reader

    def rest(self) -> None:
        """Wait for the next request, for a while."""
        self._expiry = asyncio.get_running_loop().call_later(IDLE_S, self.abort)

    def wake(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        now = perf_counter()
        if self._take is None:
            self.abort()  # the server speaks though nobody asked
            return
        reader = self._reader
        try:
            body = reader.feed(data)
            if body:
                self._take(reader, body, now)
        except BadResponse as error:
            self._end(Failure("malformed", str(error)))
        except Failure as failure:
            self._end(failure)
        else:
            if reader.complete:
                self._end(None)

    def connection_lost(self, error: Exception | None) -> None:
        reader = self._reader
        reader.end()
        if reader.complete:
            self._end(None)
        elif reader.status:
            self._end(Failure("cut_off", str(error or "the connection ended in the middle of the response")))
        else:
            self._end(Unanswered(str(error or "the server closed the connection without an answer")))

    def _end(self, failure: Failure | None) -> None:
        if self._ended is None or self._ended.done():
            return
        if failure is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(failure)


class Pool:
    """Hands out connections, the one used last first, so that no more are kept than are needed."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if target.secure else None
        self._address: str | None = None

    async def exchange(self, request: bytes, take: Take) -> ResponseReader:
        if (kept := self._find()) is not None:
            try:
                return await self._use(kept, request, take)
            except Unanswered:
                pass  # a server may end an idle connection at any time, and this was the time
        return await self._use(await self._open(), request, take)

    async def _use(self, connection: Connection, request: bytes, take: Take) -> ResponseReader:
        reader = await connection.exchange(request, take)
        if connection.usable:
            connection.rest()
            self._idle.append(connection)
        return reader

    def close(self) -> None:
        while self._idle:
            self._idle.pop().abort()

    def _find(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            connection.wake()
            if connection.usable:
                return connection
        return None

    async def _open(self) -> Connection:
        try:
            if self._address is None:
                return await self._resolve()
            return await self._connect(self._address)
        except OSError as error:
            raise Failure("connection", str(error)) from None

    async def _resolve(self) -> Connection:
        """The name is looked up once, and its first address that answers is taken from then on."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self.target.host, self.target.port, type=socket.SOCK_STREAM)
        reason: OSError | None = None
        for address in dict.fromkeys(str(info[4][0]) for info in found):
            try:
                connection = await self._connect(address)
            except OSError as error:
                reason = error
            else:
                self._address = address
                return connection
        raise reason or OSError(f"{self.target.host} has no address")

    async def _connect(self, address: str) -> Connection:
        name = self.target.host if self._tls else None
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            Connection, address, self.target.port, ssl=self._tls, server_hostname=name
        )
        return connection
