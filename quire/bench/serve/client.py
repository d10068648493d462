"""One benchmark request: its body, the streamed response chunk by chunk, and the record of both.

Decoding is typed and skips fields that are not needed. Both endpoints stream the same envelope; text is in `text`
(completions) or in `delta` (chat). Sockets and HTTP are in `http_client.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import msgspec

from quire.bench.serve.http_client import ConnectionPool, RequestFailure, ResponseReader, Target
from quire.bench.serve.metrics import UNFINISHED, RequestRecord
from quire.errors import EngineError

OK = 200
DONE = b"[DONE]"
MAX_DETAIL = 300
LOOKUP_S = 30.0


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request, ready to be sent."""

    number: int
    wanted_tokens: int
    data: bytes


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """The fields that all requests of a run share."""

    target: Target
    model: str
    chat: bool = False
    temperature: float = 0.0
    extra_fields: bool = True

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def make(self, number: int, prompt: str | list[int], max_tokens: int) -> PreparedRequest:
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "temperature": self.temperature}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        body |= {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        if self.extra_fields:
            body["ignore_eos"] = True
        return PreparedRequest(number, max_tokens, self.target.post(self.path, msgspec.json.encode(body)))


@dataclass(frozen=True, slots=True)
class BenchClient:
    """Sends requests over a pool of connections. Each one ends with one call of `on_record`, failed or not."""

    pool: ConnectionPool
    timeout_s: float
    on_record: Callable[[RequestRecord], None]

    async def send(self, request: PreparedRequest, due: float | None = None) -> None:
        response = StreamedResponse()
        failure: RequestFailure | None = None
        sent = perf_counter()
        try:
            async with asyncio.timeout(self.timeout_s):
                reader = await self.pool.request(request.data, response.take)
            response.close(reader, perf_counter())
        except RequestFailure as error:
            failure = error
        except TimeoutError:
            failure = RequestFailure("timeout", f"no whole answer within {self.timeout_s:g} s")
        except asyncio.CancelledError:
            failure = RequestFailure(UNFINISHED, "the measurement was stopped")
            raise
        finally:
            self.on_record(make_record(request, due, sent, response, failure))


def make_record(
    request: PreparedRequest, due: float | None, sent: float, response: StreamedResponse, failure: RequestFailure | None
) -> RequestRecord:
    usage = response.usage
    now = perf_counter()
    return RequestRecord(
        number=request.number,
        wanted_tokens=request.wanted_tokens,
        due=due,
        sent=sent,
        ended=now if failure or response.ended_at is None else response.ended_at,
        times=response.times,
        output_tokens=response.num_tokens,
        counted_by="usage" if usage else "chunks",
        prompt_tokens=usage.prompt_tokens if usage else None,
        cached_tokens=usage.cached_tokens if usage else None,
        num_chunks=response.num_chunks,
        failure=failure.kind if failure else None,
        detail=failure.detail if failure else None,
    )


async def send_once(pool: ConnectionPool, request: PreparedRequest, timeout_s: float) -> RequestRecord:
    """Send a request that is not measured. Raises EngineError if it fails."""
    records: list[RequestRecord] = []
    await BenchClient(pool, timeout_s, records.append).send(request)
    (record,) = records
    if not record.ok:
        raise EngineError(
            f"A first request to {pool.target.url('')} failed, so nothing was measured. "
            f"{record.failure}: {record.detail}"
        )
    return record


async def find_model(pool: ConnectionPool) -> str:
    """The id of the first model that the server lists."""
    status, body = await fetch(pool, "/v1/models")
    if status == OK:
        try:
            return str(msgspec.json.decode(body)["data"][0]["id"])
        except (msgspec.DecodeError, KeyError, IndexError, TypeError):
            pass
    raise EngineError(
        f"{pool.target.url('/v1/models')} names no model (status {status}: {show(body)}); give one with --model."
    )


async def fetch(pool: ConnectionPool, path: str) -> tuple[int, bytes]:
    """GET a path: status and body."""
    pieces: list[bytes] = []

    def keep(_: ResponseReader, piece: bytes, __: float) -> None:
        pieces.append(piece)

    try:
        async with asyncio.timeout(LOOKUP_S):
            reader = await pool.request(pool.target.get(path), keep)
    except (RequestFailure, TimeoutError) as error:
        reason = str(error) or f"no answer within {LOOKUP_S:g} s"
        raise EngineError(f"{pool.target.url(path)} does not respond: {reason}. Is the server running?") from None
    return reader.status, b"".join(pieces)


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
    def has_text(self) -> bool:
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


class StreamedResponse:
    """The state of one streamed response. `times`: when chunks with text arrived; a chunk may hold several tokens."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.usage: Usage | None = None
        self.ended_at: float | None = None
        self.num_chunks = 0
        self.finish_reason: str | None = None
        self._events = EventReader()
        self._error_body = b""

    def take(self, reader: ResponseReader, body: bytes, now: float) -> None:
        """Called by the connection for each piece of the body."""
        if reader.status != OK:
            self._error_body += body[: MAX_DETAIL - len(self._error_body)]
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
            raise RequestFailure("malformed", f"{error}: {show(data)}") from None
        if chunk.error is not None or chunk.object == "error":
            raise RequestFailure("error_event", show(data))
        if chunk.usage is not None:
            self.usage = chunk.usage
        for choice in chunk.choices or ():
            if choice.has_text:
                self.times.append(now)
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason

    def close(self, reader: ResponseReader, now: float) -> None:
        """The response is complete. Raises RequestFailure if it was cut off or has no text."""
        if reader.status != OK:
            raise RequestFailure(f"http_{reader.status}", show(self._error_body))
        if self.ended_at is None:
            self.ended_at = now
            if not self.num_chunks:
                kind = reader.headers.get("content-type", "none")
                raise RequestFailure("malformed", f"no event in a response of content type {kind[:80]}")
            if self.finish_reason is None:
                raise RequestFailure("cut_off", "the stream ended with neither [DONE] nor a finish reason")
        if not self.times:
            raise RequestFailure("empty", "the answer has no text")

    @property
    def num_tokens(self) -> int:
        """The server's count, or one for each chunk with text if the server sends no usage."""
        return self.usage.completion_tokens if self.usage else len(self.times)


def show(data: bytes) -> str:
    return " ".join(data[:MAX_DETAIL].decode("utf-8", "replace").split())


class EventReader:
    """A parser of server-sent events. It returns the data of an event as soon as the empty line after it arrives.

    Lines end in LF, CRLF or CR. Comments, and fields other than `data`, are dropped; several data lines are one value.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._after_return = False

    def feed(self, body: bytes) -> list[bytes]:
        if self._after_return or b"\r" in body:
            body = self._normalize(body)
        *blocks, self._rest = (self._rest + body).split(b"\n\n")
        return [data for block in blocks if (data := event_data(block)) is not None]

    def _normalize(self, body: bytes) -> bytes:
        """Convert line ends to LF. A CR ends its line at once; an LF right after it belongs to it."""
        if self._after_return and body.startswith(b"\n"):
            body = body[1:]
            self._after_return = False
        if body:
            self._after_return = body.endswith(b"\r")
        return body.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def event_data(block: bytes) -> bytes | None:
    """The data of an event, or None."""
    if block.startswith(b"data: ") and b"\n" not in block:
        return block[6:]
    values = [line[5:] for line in block.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(value.removeprefix(b" ") for value in values) if values else None
