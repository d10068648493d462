"""A server of OpenAI's streams without a model: raw HTTP in a thread, every byte decided by the test.

Run as a program it prints its address on stderr as `quire serve` does, for the tests of --spawn.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

Answer = Callable[["Call"], AsyncIterator[bytes]]
EVENT_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Call:
    """A request as it came in."""

    def __init__(self, number: int, path: str, headers: dict[str, str], body: bytes) -> None:
        self.number = number
        self.path = path
        self.headers = headers
        self.body: dict[str, Any] = json.loads(body) if body else {}

    @property
    def prompt(self) -> Any:
        return self.body["messages"][0]["content"] if "messages" in self.body else self.body["prompt"]

    @property
    def num_prompt_tokens(self) -> int:
        """Every word is two tokens, and every prompt has three more."""
        return len(self.prompt) if isinstance(self.prompt, list) else 3 + 2 * len(self.prompt.split())


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(document: Any) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def piece(call: Call, text: str, finish: str | None = None) -> bytes:
    """One chunk of an answer, in the shape that the endpoint has."""
    content = {"delta": {"content": text}} if "messages" in call.body else {"text": text}
    return event({"id": "x", "object": "chunk", "choices": [{"index": 0, **content, "finish_reason": finish}]})


def usage(call: Call, num_tokens: int, num_cached: int = 0) -> bytes:
    counts = {"prompt_tokens": call.num_prompt_tokens, "completion_tokens": num_tokens}
    return event({"choices": [], "usage": {**counts, "prompt_tokens_details": {"cached_tokens": num_cached}}})


def refuse(status: int, words: str, *, close: bool = False) -> bytes:
    body = json.dumps({"error": {"message": words}}).encode()
    more = b"Connection: close\r\n" if close else b""
    return b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n%s\r\n%s" % (status, len(body), more, body)


async def whole_answer(call: Call) -> AsyncIterator[bytes]:
    """As many tokens as were asked for, one a chunk, each in a write of its own."""
    yield EVENT_STREAM
    if "messages" in call.body:
        yield chunk(event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
    count = call.body["max_tokens"]
    for number in range(count):
        yield chunk(piece(call, f" w{number}", "length" if number == count - 1 else None))
        await asyncio.sleep(0)
    if call.body.get("stream_options", {}).get("include_usage"):
        yield chunk(usage(call, count))
    yield END


class FakeServer:
    """Serves while the block runs; keeps the calls that asked for an answer, and counts connections."""

    def __init__(self, answer: Answer = whole_answer, port: int = 0, *, hangs_up: bool = False) -> None:
        self.answer = answer
        self.hangs_up = hangs_up  # on whoever asks a second time on one connection
        self.port = port
        self.calls: list[Call] = []
        self.num_connections = 0
        self.num_open = 0
        self.most_open = 0
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self.serve()))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FakeServer:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stop(self) -> None:
        self._stop.set()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.create_task(self._converse(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._answer_one(reader, writer):
                if self.hangs_up:
                    await reader.readuntil(b"\r\n\r\n")
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection stays open."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        path = first.split(" ")[1]
        if path.endswith(("/models", "/ready")):
            models = json.dumps({"object": "list", "data": [{"id": "fake-model"}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(models), models))
            return True
        call = Call(len(self.calls), path, headers, body)
        self.calls.append(call)
        return await self._write_answer(call, writer)

    async def _write_answer(self, call: Call, writer: asyncio.StreamWriter) -> bool:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        last = b""
        try:
            async for data in self.answer(call):
                writer.write(data)
                await writer.drain()
                last = data
        finally:
            self.num_open -= 1
        return last.endswith(b"0\r\n\r\n") or (b"Content-Length" in last and b"Connection: close" not in last)


async def main() -> None:
    server = FakeServer()
    task = asyncio.create_task(server.serve())
    loop = asyncio.get_running_loop()
    while not server._started.is_set():
        await asyncio.sleep(0.01)
    loop.add_signal_handler(signal.SIGTERM, server.stop)
    print("fake: loading", "noise " * 20_000, file=sys.stderr)
    print(f"fake: serving at {server.url} (Ctrl-C ends it)", file=sys.stderr, flush=True)
    await task
    print("fake: bye", file=sys.stderr, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
