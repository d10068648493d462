"""Connection: the protocol of one client's socket, with limits that hold before the API key is checked.

uvicorn reads HTTP and runs the application. This file adds a limit on the bytes of headers (431), a timeout for them
(408), and a limit on connections that leaves file descriptors for everything else (503). The limits on bodies are in
`middleware.py`, where a refusal can have the form of the API that was called.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from time import monotonic
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire.errors import HeadersTooLarge, InvalidRequest, QuireError, RequestTimeout, TooManyConnections
from quire.server.error_response import openai_error
from quire.server.streaming import encode_json

RESERVED_FILES = 128  # for the engine's pipes, models, logs, and connections that are being refused
LOG_EVERY_S = 10.0

log = logging.getLogger("quire.server")


@dataclass(slots=True)
class RefusalLog:
    """Logs refused connections: the first at once, then their number every few seconds."""

    max_connections: int
    now: Callable[[], float] = monotonic
    _num_refused: int = 0
    _next_s: float = field(default=float("-inf"))

    def add(self) -> None:
        self._num_refused += 1
        if self.now() < self._next_s:
            return
        log.warning(
            "%d connections refused: %d are open, the most that the limit on open files allows; raise it (ulimit -n)",
            self._num_refused,
            self.max_connections,
        )
        self._num_refused, self._next_s = 0, self.now() + LOG_EVERY_S


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    max_header_bytes: int
    read_timeout_s: float
    max_connections: int
    refusals: RefusalLog


class UvicornConfig(uvicorn.Config):
    """uvicorn's settings with the limits of connections."""

    def __init__(self, app: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(app, http=Connection, **options)
        self.limits = limits


class Connection(HttpToolsProtocol):
    """A timer runs from the start of the connection, or the first byte of a request, until the body is complete.

    The timer does not close a connection that has a response in progress.
    """

    config: UvicornConfig

    def __init__(self, config: UvicornConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self._limits = config.limits
        self._timer: asyncio.TimerHandle | None = None
        self._num_pending = 0  # bytes received since the parser last completed headers or found body bytes
        self._error: QuireError | None = None  # raised by a callback of the parser

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._limits.refusals.add()
            self._refuse(TooManyConnections("The server has its maximum number of connections; try again later."))
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._unset_keepalive_if_required()  # uvicorn leaves it running, and it holds this object
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._num_pending += len(data)
        if not self._is_responding():
            self._start_timer()
        super().data_received(data)
        if self._num_pending > self._limits.max_header_bytes and not self.transport.is_closing():
            self._refuse(self._headers_too_large())

    # Called by the parser.

    def on_message_begin(self) -> None:
        self._start_timer()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._num_pending = 0
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > self._limits.max_header_bytes:
            self._error = self._headers_too_large()
            raise self._error
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        self._num_pending = 0

    def on_body(self, body: bytes) -> None:
        self._num_pending = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_pending = 0
        self._stop_timer()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this when the parser fails."""
        self._refuse(self._error or InvalidRequest("The request is not valid HTTP/1.1."))

    # The timer.

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._limits.read_timeout_s, self._time_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_out(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self._is_responding():
            self._start_timer()
        elif self._num_pending:
            seconds = f"{self._limits.read_timeout_s:g}"
            self._refuse(RequestTimeout(f"The request's headers did not arrive within {seconds} s."))
        else:
            self.transport.close()

    def _is_responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _headers_too_large(self) -> HeadersTooLarge:
        max_bytes = self._limits.max_header_bytes
        return HeadersTooLarge(f"The request's headers have more than {max_bytes:,} bytes, the most this server reads.")

    def _refuse(self, error: QuireError) -> None:
        """Send an error unless a response has started, and close the connection."""
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            body = encode_json(openai_error(error))
            head = (
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


def max_connections(max_files: int) -> int:
    """The number of connections that leaves enough file descriptors for everything else."""
    return max(max_files - RESERVED_FILES, max_files // 2)
