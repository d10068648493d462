"""An HTTP/1.1 client for load generation: the address of a server, a pool of connections, a parser of responses.

Not a general client: no redirects, no proxies, no compression, one request at a time on a connection. The load
generator shares its machine with the server under test, so a streamed token must cost little here. The arrival time of
bytes is taken when the event loop delivers them, before they are parsed.
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

MAX_HEAD_BYTES = 1 << 16
INTERIM = range(100, 200)

# Shorter than the keep-alive of servers, so that no server closes a connection while a request is on its way.
IDLE_S = 1.0


class BadResponse(Exception):
    """Bytes that are not an HTTP response."""


@dataclass(frozen=True, slots=True)
class Target:
    """The address of a server, and the path prefix of its API."""

    secure: bool
    host: str
    port: int
    prefix: str
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, url: str, api_key: str | None = None) -> Target:
        """Parse a URL with or without /v1."""
        split = urlsplit(url)
        try:
            port = split.port
        except ValueError:
            raise InvalidParams(f"--base-url is {url!r}, whose port is not from 0 to 65535.") from None
        if split.scheme not in ("http", "https") or not split.hostname or split.query or split.fragment:
            raise InvalidParams(f"--base-url is {url!r}; give an address such as http://127.0.0.1:8000.")
        if any(character.isspace() for character in url):
            raise InvalidParams(f"--base-url is {url!r}, which has a space in it.")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
            raise InvalidParams("--api-key may hold only printable ASCII characters and no spaces.")
        secure = split.scheme == "https"
        prefix = split.path.rstrip("/").removesuffix("/v1")
        return cls(secure, split.hostname, port or (443 if secure else 80), prefix, api_key)

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
    """Parses one response as it arrives. Body bytes are returned at once, also from the middle of a chunk.

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
        """Parse bytes, and return the body bytes among them."""
        if not self._has_head:
            self._num_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:
            raise BadResponse("the server switches to another protocol") from None
        except HttpParserError as error:
            if not self.complete:
                raise BadResponse(f"{error} in {data[:80]!r}") from None
            self.keep_alive = False  # bytes after the response are not a response
        if not self._has_head and self._num_head_bytes > MAX_HEAD_BYTES:
            raise BadResponse(f"the head of the response is longer than {MAX_HEAD_BYTES:,} bytes")
        body, self._body = self._body, []
        return body[0] if len(body) == 1 else b"".join(body)

    def end(self) -> None:
        """The server closed the connection. That completes a body without a length."""
        if self._has_head and not self._has_length():
            self.complete = True

    def _has_length(self) -> bool:
        return "content-length" in self.headers or "chunked" in self.headers.get("transfer-encoding", "").lower()

    def on_message_begin(self) -> None:
        if self.complete:
            self.keep_alive = False  # a second response without a request

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


OnBody = Callable[[ResponseReader, bytes, float], None]


class RequestFailure(Exception):
    """Why a request failed: a kind to count by, and a description."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class ConnectionClosed(RequestFailure):
    """The connection was closed before the first byte of a response."""

    def __init__(self, detail: str) -> None:
        super().__init__("connection", detail)


class Connection(asyncio.Protocol):
    """One socket. `request` sends a request and passes the pieces of the response body to a callback."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reader = ResponseReader()
        self._on_body: OnBody | None = None
        self._ended: asyncio.Future[None] | None = None
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def request(self, request: bytes, on_body: OnBody) -> ResponseReader:
        """Returns when the response is complete. `on_body` may raise RequestFailure. Not usable after an error."""
        assert self._transport is not None
        assert self._ended is None
        self._reader, self._on_body = ResponseReader(), on_body
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._ended
        except BaseException:
            self.abort()
            raise
        finally:
            self._on_body = self._ended = None
        if not self._reader.keep_alive:
            self.abort()
        return self._reader

    def start_idle_timer(self) -> None:
        """Close the connection unless another request comes soon."""
        self._expiry = asyncio.get_running_loop().call_later(IDLE_S, self.abort)

    def stop_idle_timer(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        now = perf_counter()
        if self._on_body is None:
            self.abort()  # bytes without a request
            return
        reader = self._reader
        try:
            body = reader.feed(data)
            if body:
                self._on_body(reader, body, now)
        except BadResponse as error:
            self._end(RequestFailure("malformed", str(error)))
        except RequestFailure as failure:
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
            self._end(RequestFailure("cut_off", str(error or "the connection ended in the middle of the response")))
        else:
            self._end(ConnectionClosed(str(error or "the server closed the connection without an answer")))

    def _end(self, failure: RequestFailure | None) -> None:
        if self._ended is None or self._ended.done():
            return
        if failure is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(failure)


class ConnectionPool:
    """Reuses connections, the last used first, so that the number of idle ones stays small."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if target.secure else None
        self._address: str | None = None

    async def request(self, request: bytes, on_body: OnBody) -> ResponseReader:
        if (kept := self._find()) is not None:
            try:
                return await self._use(kept, request, on_body)
            except ConnectionClosed:
                pass  # the server closed the idle connection; open a new one
        return await self._use(await self._open(), request, on_body)

    async def _use(self, connection: Connection, request: bytes, on_body: OnBody) -> ResponseReader:
        reader = await connection.request(request, on_body)
        if connection.usable:
            connection.start_idle_timer()
            self._idle.append(connection)
        return reader

    def close(self) -> None:
        while self._idle:
            self._idle.pop().abort()

    def _find(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            connection.stop_idle_timer()
            if connection.usable:
                return connection
        return None

    async def _open(self) -> Connection:
        try:
            if self._address is None:
                return await self._resolve()
            return await self._connect(self._address)
        except OSError as error:
            raise RequestFailure("connection", str(error)) from None

    async def _resolve(self) -> Connection:
        """Look up the name once. The first address that accepts a connection is used from then on."""
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
