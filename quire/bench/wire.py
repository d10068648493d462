"""HTTP/1.1 as `quire bench serve` speaks it: where a server is, the bytes of a request, a response read as it arrives.

Not a general client: no redirects, no proxies, no compression, one request at a time on a connection. It exists because
the load generator shares its machine with the server under test, so what a streamed token costs here is taken from
there. Sockets are in `connections.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from quire.errors import InvalidParams

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
