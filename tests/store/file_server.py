"""A small HTTP server for one file, which can cut connections, ignore ranges and answer with errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class FileServer:
    """What is served, how badly, and what was asked for."""

    body: bytes
    ranges: bool = True
    cuts: list[int] = field(default_factory=list)  # each cuts one answer after so many bytes
    statuses: list[int] = field(default_factory=list)  # each replaces one answer
    asked: list[str | None] = field(default_factory=list)  # the Range header of every request
    url: str = ""


@contextmanager
def serving(server: FileServer) -> Iterator[FileServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.asked.append(self.headers.get("Range"))
            if server.statuses:
                self.answer(server.statuses.pop(0), {}, b"")
                return
            start = self.first_byte()
            total = len(server.body)
            if start is None:
                self.answer(200, {}, server.body)
            elif start >= total:
                self.answer(416, {"Content-Range": f"bytes */{total}"}, b"")
            else:
                self.answer(206, {"Content-Range": f"bytes {start}-{total - 1}/{total}"}, server.body[start:])

        def first_byte(self) -> int | None:
            asked = self.headers.get("Range")
            return int(asked.removeprefix("bytes=").removesuffix("-")) if asked and server.ranges else None

        def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body[: server.cuts.pop(0)] if server.cuts and body else body)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, args=(0.01,))
        thread.start()
        server.url = f"http://127.0.0.1:{listener.server_port}/model-1.0-py3-none-any.whl"
        try:
            yield server
        finally:
            listener.shutdown()
            thread.join()
