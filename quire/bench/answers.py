"""A streamed answer, read chunk by chunk: when text arrived, what the server counted, and how it ended.

Decoding is typed and skips what is not asked for. Both endpoints stream the same envelope; text lies in `text`
(completions) or in `delta` (chat).
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.bench.connections import Failure
from quire.bench.events import EventReader
from quire.bench.wire import ResponseReader

OK = 200
DONE = b"[DONE]"
MAX_DETAIL = 300


class Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def brings_text(self) -> bool:
        delta = self.delta
        if delta is None:
            return bool(self.text)
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int:
        details = self.prompt_tokens_details
        return (details.cached_tokens or 0) if details else 0


class Chunk(msgspec.Struct, gc=False):
    choices: list[Choice] | None = None
    usage: Usage | None = None
    object: str | None = None
    error: Any = None


decode = msgspec.json.Decoder(Chunk).decode


class Answer:
    """What one response has brought so far. Times are those of the chunks with text, which may hold several tokens."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.usage: Usage | None = None
        self.ended_at: float | None = None
        self.num_chunks = 0
        self.finish_reason: str | None = None
        self._events = EventReader()
        self._refusal = b""

    def take(self, reader: ResponseReader, body: bytes, now: float) -> None:
        """A piece of the body, as `Connection.exchange` hands it on."""
        if reader.status != OK:
            self._refusal += body[: MAX_DETAIL - len(self._refusal)]
            return
        for data in self._events.feed(body):
            self._take_event(data, now)

    def _take_event(self, data: bytes, now: float) -> None:
        if data == DONE:
            self.ended_at = now
            return
        self.num_chunks += 1
        try:
            chunk = decode(data)
        except msgspec.DecodeError as error:
            raise Failure("malformed", f"{error}: {show(data)}") from None
        if chunk.error is not None or chunk.object == "error":
            raise Failure("error_event", show(data))
        if chunk.usage is not None:
            self.usage = chunk.usage
        for choice in chunk.choices or ():
            if choice.brings_text:
                self.times.append(now)
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason

    def close(self, reader: ResponseReader, now: float) -> None:
        """The response is complete. Raises a Failure unless it was a whole answer with something in it."""
        if reader.status != OK:
            raise Failure(f"http_{reader.status}", show(self._refusal))
        if self.ended_at is None:
            self.ended_at = now
            if not self.num_chunks:
                kind = reader.headers.get("content-type", "none")
                raise Failure("malformed", f"no event in a response of content type {kind[:80]}")
            if self.finish_reason is None:
                raise Failure("cut_off", "the stream ended with neither [DONE] nor a finish reason")
        if not self.times:
            raise Failure("empty", "the answer has no text")

    @property
    def num_tokens(self) -> int:
        """As the server counted, or one for each chunk with text if it did not say."""
        return self.usage.completion_tokens if self.usage else len(self.times)


def show(data: bytes) -> str:
    return " ".join(data[:MAX_DETAIL].decode("utf-8", "replace").split())
