"""HTTP/1.1 as `quire bench serve` speaks it: where a server is, the bytes of a request, a response read as it arrives.

Not a general client: no redirects, no proxies, no compression, one request at a time on a connection. It exists because
the load generator shares its machine with the server under test, so what a streamed token costs here is taken from
there. Sockets are in `connections.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from quire.errors import InvalidParams

MAX_HEAD_BYTES = 1 << 16
MAX_SIZE_LINE_BYTES = 1 << 12
NO_BODY = (204, 304)


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
    """One response, fed as it arrives. Body bytes are handed on at once, also from the middle of a chunk."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self.keep_alive = False
        self._buffer = b""
        self._left = 0
        self._read: Callable[[bytes], bytes] = self._read_head

    def feed(self, data: bytes) -> bytes:
        """The part of the body that came with these bytes."""
        return self._read(data)

    def end(self) -> None:
        """The server has closed the connection, which completes a body of no stated length."""
        if self._read == self._read_rest:
            self.complete = True

    def _read_head(self, data: bytes) -> bytes:
        buffer = self._buffer + data
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(buffer) > MAX_HEAD_BYTES:
                raise BadResponse(f"the head of the response is longer than {MAX_HEAD_BYTES:,} bytes")
            self._buffer = buffer
            return b""
        self._buffer = b""
        self._parse_head(buffer[:end].decode("latin-1"))
        self._read = self._read_head if 100 <= self.status < 200 else self._choose_body()
        return self._read(buffer[end + 4 :])

    def _parse_head(self, text: str) -> None:
        first, *lines = text.split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
            raise BadResponse(f"the response begins with {first[:80]!r}")
        self.status = int(rest[:3])
        pairs = (line.partition(":") for line in lines)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        connection = self.headers.get("connection", "").lower()
        self.keep_alive = "close" not in connection and (version != "HTTP/1.0" or "keep-alive" in connection)

    def _choose_body(self) -> Callable[[bytes], bytes]:
        if self.status in NO_BODY:
            return self._read_counted
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            return self._read_chunked
        length = self.headers.get("content-length")
        if length is None:
            self.keep_alive = False
            return self._read_rest
        if not length.isdecimal():
            raise BadResponse(f"the content length is {length[:80]!r}")
        self._left = int(length)
        return self._read_counted

    def _read_rest(self, data: bytes) -> bytes:
        return data

    def _read_counted(self, data: bytes) -> bytes:
        body = data[: self._left]
        self._left -= len(body)
        if not self._left:
            self._finish(data[len(body) :])
        return body

    def _read_chunked(self, data: bytes) -> bytes:
        """`_left` bytes are missing of the current chunk; `_buffer` holds the beginning of a size line."""
        if self._buffer:
            data = self._buffer + data
        pieces = []
        position = 0
        while True:
            if self._left:
                piece = data[position : position + self._left]
                pieces.append(piece)
                position += len(piece)
                self._left -= len(piece)
            # The line end that closes a chunk is read together with the size line after it.
            start = position + 2 if data.startswith(b"\r\n", position) else position
            end = data.find(b"\r\n", start)
            if end < 0:
                break
            self._left = parse_size(data[start:end])
            position = end + 2
            if not self._left:
                self._read, self._buffer = self._read_trailers, b""
                self._read_trailers(data[end:])
                return b"".join(pieces)
        self._buffer = data[position:]
        if len(self._buffer) > MAX_SIZE_LINE_BYTES:
            raise BadResponse("a chunk has no size")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _read_trailers(self, data: bytes) -> bytes:
        """From the line end after the last chunk's size: an empty line is the end."""
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end >= 0:
            self._finish(self._buffer[end + 4 :])
        elif len(self._buffer) > MAX_HEAD_BYTES:
            raise BadResponse(f"the trailers are longer than {MAX_HEAD_BYTES:,} bytes")
        return b""

    def _finish(self, surplus: bytes) -> None:
        self.complete = True
        self.keep_alive = self.keep_alive and not surplus


def parse_size(line: bytes) -> int:
    """The size in a chunk's first line, without its extensions."""
    digits = line.partition(b";")[0].strip()
    try:
        size = int(digits, 16)
    except ValueError:
        size = -1
    if size < 0:
        raise BadResponse(f"a chunk's size is {digits[:80]!r}")
    return size
