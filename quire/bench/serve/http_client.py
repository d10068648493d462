"""Connections to the server under test: opened as needed, used again, one request at a time on each.

Arrival is stamped when the event loop hands over the bytes, before anything is parsed. What the bytes mean is for the
caller (`asking.py`).


HTTP/1.1 as `quire bench serve` speaks it: where a server is, the bytes of a request, a response read as it arrives.

Not a general client: no redirects, no proxies, no compression, one request at a time on a connection. It exists because
the load generator shares its machine with the server under test, so what a streamed token costs here is taken from
there. Sockets are in `connections.py`.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from quire.errors import InvalidParams

# Shorter than servers keep an idle connection, so that none is closed from there while a request is on its way.
IDLE_S = 1.0

Take = Callable[["ResponseReader", bytes, float], None]


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


MAX_HEAD_BYTES = 1 << 16
INTERIM = range(100, 200)


class BadResponse(Exception):
    """Bytes that are no HTTP response."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and the path below which its API lies."""

    secure: bool
    host: str
    port: int
    prefix: str
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, url: str, api_key: str | None = None) -> Target:
        """From an address with or without /v1."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            raise InvalidParams(f"--base-url is {url!r}, whose port is not from 0 to 65535.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise InvalidParams(f"--base-url is {url!r}; give an address such as http://127.0.0.1:8000.")
        if any(character.isspace() for character in url):
            raise InvalidParams(f"--base-url is {url!r}, which has a space in it.")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
            raise InvalidParams("--api-key may hold only printable ASCII characters and no spaces.")
        secure = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(secure, parts.hostname, port or (443 if secure else 80), prefix, api_key)

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def url(self, path: str) -> str:
        return f"{'https' if self.secure else 'http'}://{self.address}{self.prefix}{path}"

    def post(self, path: str, body: bytes) -> bytes:
        lines = [*self._lines("POST", path), "Content-Type: application/json", f"Content-Length: {len(body)}"]
        return head(lines) + body

    def get(self, path: str) -> bytes:
        return head(self._lines("GET", path))

    def _lines(self, method: str, path: str) -> list[str]:
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {self.address}", "User-Agent: quire-bench"]
        lines += ["Accept: */*", "Accept-Encoding: identity"]
        return lines if self.api_key is None else [*lines, f"Authorization: Bearer {self.api_key}"]


def head(lines: list[str]) -> bytes:
    return "\r\n".join([*lines, "", ""]).encode()


class ResponseReader:
    """One response, fed as it arrives. Body bytes are handed on at once, also from the middle of a chunk.

    httptools parses; it calls the methods whose names begin with `on_`.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self.keep_alive = False
        self._parser = HttpResponseParser(self)
        self._num_head_bytes = 0
        self._has_head = False
        self._body: list[bytes] = []

    def feed(self, data: bytes) -> bytes:
        """The part of the body that came with these bytes."""
        if not self._has_head:
            self._num_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:
            raise BadResponse("the server switches to another protocol") from None
        except HttpParserError as error:
            if not self.complete:
                raise BadResponse(f"{error} in {data[:80]!r}") from None
            self.keep_alive = False  # what comes after the response is none
        if not self._has_head and self._num_head_bytes > MAX_HEAD_BYTES:
            raise BadResponse(f"the head of the response is longer than {MAX_HEAD_BYTES:,} bytes")
        body, self._body = self._body, []
        return body[0] if len(body) == 1 else b"".join(body)

    def end(self) -> None:
        """The server has closed the connection, which completes a body of no stated length."""
        if self._has_head and not self._states_length():
            self.complete = True

    def _states_length(self) -> bool:
        return "content-length" in self.headers or "chunked" in self.headers.get("transfer-encoding", "").lower()

    def on_message_begin(self) -> None:
        if self.complete:
            self.keep_alive = False  # a second response, which nobody asked for

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # trailers come here too
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self.complete:
            return
        self.status = self._parser.get_status_code()
        if self.status in INTERIM:
            self.headers.clear()
        else:
            self._has_head = True
            self.keep_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        if not self.complete:
            self._body.append(body)

    def on_message_complete(self) -> None:
        self.complete = self._has_head
