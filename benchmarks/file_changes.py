"""How many files a reader opens to follow one chat request: files of quire/ that run, and changes between them.

    python benchmarks/file_changes.py [--stream] [--tokens 4] [--under server] [--list]

The request goes through the ASGI application to a fake engine that answers with fixed tokens, one at a time. A change
is a call (or a resumption of a coroutine) in another file than the call before. A first request loads and compiles what
later requests share. It is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import quire
from quire.config import EngineConfig
from quire.core.plan import Update
from quire.core.request import Finish, Request
from quire.server.app import build_app
from quire.server.auth import ApiKeys
from quire.server.config import ServerConfig
from quire.server.metrics import Metrics
from quire.server.service import Service
from quire.store import resolve
from quire.text.tokenizers.tokenizer import load_tokenizer

ROOT = str(Path(quire.__file__).parent)


class FakeEngine:
    """Answers every request with the same tokens, one in each update."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens

    async def submit(self, requests: Sequence[Request]) -> AsyncIterator[list[Update]]:
        for index, token in enumerate(self.tokens):
            finish = Finish.LENGTH if index == len(self.tokens) - 1 else None
            yield [Update(request.id, [token], finish) for request in requests]

    def abort(self, request_id: str) -> None:
        raise AssertionError("nothing is aborted here")

    def health(self) -> bool:
        return True


class Trace:
    """The files in which functions are called, in order. Consecutive equal files count once."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.files: list[str] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(self.root) and (not self.files or self.files[-1] != path):
            self.files.append(path)


async def chat(app: Any, body: dict[str, Any]) -> bytes:
    """One POST to /v1/chat/completions, as an ASGI server makes it."""
    inbox, outbox = [{"type": "http.request", "body": json.dumps(body).encode()}], []

    async def receive() -> dict[str, Any]:
        return inbox.pop() if inbox else await asyncio.Event().wait()

    async def send(message: dict[str, Any]) -> None:
        outbox.append(message)

    path, headers = "/v1/chat/completions", [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
             "headers": headers, "root_path": "", "scheme": "http", "http_version": "1.1"}  # fmt: skip
    await app(scope, receive, send)
    assert outbox[0]["status"] == 200, outbox
    return b"".join(message.get("body", b"") for message in outbox)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stream", action="store_true", help="ask for a stream")
    parser.add_argument("--tokens", type=int, default=4, help="tokens in the answer, one in each update")
    parser.add_argument("--under", default="", help="count only files in this folder of quire/")
    parser.add_argument("--list", action="store_true", help="print each file with the number of changes to it")
    options = parser.parse_args()
    tokenizer = load_tokenizer(resolve("smollm2:135m").path)
    config, metrics = ServerConfig(log_requests=True), Metrics()
    app = build_app(config, ApiKeys({}), metrics)
    ready = SimpleNamespace(
        max_requests=8, vocab_size=tokenizer.vocab_size, max_len=2048, eos_token_ids=[], sampling={}, device="cpu"
    )
    engine: Any = FakeEngine([*range(1000, 1000 + options.tokens)])
    app.service = Service(engine, ready, tokenizer, config, EngineConfig(), metrics)  # type: ignore[arg-type]
    body = {"messages": [{"role": "user", "content": "Hello"}], "stream": options.stream}
    trace = Trace(str(Path(ROOT, options.under)))
    threading.setprofile(trace)  # before the first request starts the threads that render templates
    sys.setprofile(trace)
    await chat(app, body)
    trace.files.clear()
    await chat(app, body)
    sys.setprofile(None)
    counts = Counter(str(Path(path).relative_to(ROOT)) for path in trace.files)
    print(f"{len(counts)} files, {len(trace.files) - 1} changes of file")
    if options.list:
        print("\n".join(f"{count:5} {path}" for path, count in counts.most_common()))


if __name__ == "__main__":
    asyncio.run(main())
