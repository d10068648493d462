"""Stream: reads the lines of a server's /console/live in a thread. `cli/top.py` takes them between two pictures."""

from __future__ import annotations

import http.client
import json
import queue
import threading
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from quire.errors import InvalidParams, QuireError, ServerError, Unauthorized

PATH = "/console/live"
SILENT_S = 10.0  # the server sends a line at least every 2 seconds
RETRY_S = 1.0

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection has been lost, or could not be made again."""

    reason: str


class Stream:
    """One connection after another. The first one is made by the constructor, which raises if that fails."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url.rstrip("/")
        self._address = parse(self.url)
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._lines: queue.SimpleQueue[Document | Lost] = queue.SimpleQueue()
        self._closed = threading.Event()
        response = self._open()
        self._thread = threading.Thread(target=self._run, args=(response,), daemon=True)
        self._thread.start()

    def take(self) -> list[Document | Lost]:
        """What has arrived since the last call."""
        taken: list[Document | Lost] = []
        while not self._lines.empty():
            taken.append(self._lines.get())
        return taken

    def close(self) -> None:
        self._closed.set()

    def _run(self, response: http.client.HTTPResponse) -> None:
        while not self._closed.is_set():
            try:
                while line := response.readline():
                    self._lines.put(json.loads(line))
                    if self._closed.is_set():
                        return
                self._lines.put(Lost("the server has closed the connection"))
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._lines.put(Lost(describe(error)))
            response = self._open_again(response)

    def _open_again(self, response: http.client.HTTPResponse) -> http.client.HTTPResponse:
        while not self._closed.wait(RETRY_S):
            try:
                return self._open()
            except QuireError as error:
                self._lines.put(Lost(str(error)))
        return response

    def _open(self) -> http.client.HTTPResponse:
        address = self._address
        kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        connection = kind(address.hostname or "", address.port, timeout=SILENT_S)
        try:
            connection.request("GET", address.path + PATH, headers=self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerError(
                f"There is no answer from {self.url}: {describe(error)}. Start one with `quire serve`, or give the "
                "URL of one."
            ) from None
        if response.status != 200:
            raise refusal(self.url, response)
        return response


def parse(url: str) -> SplitResult:
    try:
        address = urlsplit(url)
        _ = address.port
    except ValueError as error:
        raise InvalidParams(f"{url} is not a URL: {error}.") from None
    if address.scheme not in ("http", "https") or not address.hostname:
        raise InvalidParams(f"{url} is not the URL of a server; write it as http://127.0.0.1:8000.")
    return address


def refusal(url: str, response: http.client.HTTPResponse) -> QuireError:
    """The error that a response with another status than 200 is."""
    if response.status == 401:
        return Unauthorized(f"{url} needs an API key; give it as --api-key or in $QUIRE_API_KEY.")
    if response.status == 404:
        return ServerError(f"{url} shows no live view: its server was started with --no-console, or is not quire's.")
    try:
        message = json.loads(response.read(65536))["error"]["message"]
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        message = response.reason
    return ServerError(f"{url} answers with status {response.status}: {message}")


def describe(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"nothing came for {SILENT_S:g} seconds"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__
