"""Putting a question to the server and writing down what came of it: one request from bytes to Record.

A streamed answer, read chunk by chunk: when text arrived, what the server counted, and how it ended.

Decoding is typed and skips what is not asked for. Both endpoints stream the same envelope; text lies in `text`
(completions) or in `delta` (chat).


Server-sent events, cut out of a body as it arrives. Knows lines and fields, not what the data mean."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import msgspec

from quire.bench.serve.http_client import Failure, Pool, ResponseReader, Target
from quire.bench.serve.metrics import UNFINISHED, Record
from quire.errors import EngineError

LOOKUP_S = 30.0


@dataclass(frozen=True, slots=True)
class Question:
    """A request, ready to be sent."""

    number: int
    wanted_tokens: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Form:
    """What all questions of a run have in common."""

    target: Target
    model: str
    chat: bool = False
    temperature: float = 0.0
    extra_fields: bool = True

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def fill(self, number: int, prompt: str | list[int], max_tokens: int) -> Question:
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "temperature": self.temperature}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        body |= {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        if self.extra_fields:
            body["ignore_eos"] = True
        return Question(number, max_tokens, self.target.post(self.path, msgspec.json.encode(body)))


@dataclass(frozen=True, slots=True)
class Asker:
    """Sends questions over a pool of connections. Whatever becomes of one, `note` gets a record of it."""

    pool: Pool
    timeout_s: float
    note: Callable[[Record], None]

    async def ask(self, question: Question, due: float | None = None) -> None:
        answer = Answer()
        failure: Failure | None = None
        sent = perf_counter()
        try:
            async with asyncio.timeout(self.timeout_s):
                reader = await self.pool.exchange(question.data, answer.take)
            answer.close(reader, perf_counter())
        except Failure as error:
            failure = error
        except TimeoutError:
            failure = Failure("timeout", f"no whole answer within {self.timeout_s:g} s")
        except asyncio.CancelledError:
            failure = Failure(UNFINISHED, "the measurement was stopped")
            raise
        finally:
            self.note(record_of(question, due, sent, answer, failure))


def record_of(question: Question, due: float | None, sent: float, answer: Answer, failure: Failure | None) -> Record:
    usage = answer.usage
    now = perf_counter()
    return Record(
        number=question.number,
        wanted_tokens=question.wanted_tokens,
        due=due,
        sent=sent,
        ended=now if failure or answer.ended_at is None else answer.ended_at,
        times=answer.times,
        output_tokens=answer.num_tokens,
        counted_by="usage" if usage else "chunks",
        prompt_tokens=usage.prompt_tokens if usage else None,
        cached_tokens=usage.cached_tokens if usage else None,
        num_chunks=answer.num_chunks,
        failure=failure.kind if failure else None,
        detail=failure.detail if failure else None,
    )


async def ask_once(pool: Pool, question: Question, timeout_s: float) -> Record:
    """A question that is not part of the measurement, but must be answered."""
    records: list[Record] = []
    await Asker(pool, timeout_s, records.append).ask(question)
    (record,) = records
    if not record.ok:
        raise EngineError(
            f"A first request to {pool.target.url('')} failed, so nothing was measured. "
            f"{record.failure}: {record.detail}"
        )
    return record


async def find_model(pool: Pool) -> str:
    """The first model that the server lists."""
    status, body = await fetch(pool, "/v1/models")
    if status == OK:
        try:
            return str(msgspec.json.decode(body)["data"][0]["id"])
        except (msgspec.DecodeError, KeyError, IndexError, TypeError):
            pass
    raise EngineError(
        f"{pool.target.url('/v1/models')} names no model (status {status}: {show(body)}); give one with --model."
    )


async def fetch(pool: Pool, path: str) -> tuple[int, bytes]:
    """A page of the server, as status and body."""
    pieces: list[bytes] = []

    def keep(_: ResponseReader, piece: bytes, __: float) -> None:
        pieces.append(piece)

    try:
        async with asyncio.timeout(LOOKUP_S):
            reader = await pool.exchange(pool.target.get(path), keep)
    except (Failure, TimeoutError) as error:
        reason = str(error) or f"no answer within {LOOKUP_S:g} s"
        raise EngineError(f"{pool.target.url(path)} does not answer: {reason}. Is the server running?") from None
    return reader.status, b"".join(pieces)


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


class EventReader:
    """Gives the data of each event as soon as the empty line after it is there.

    Lines end in LF, CRLF or CR. Comments, and fields other than `data`, are dropped; several data lines are one value.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._after_return = False

    def feed(self, body: bytes) -> list[bytes]:
        if self._after_return or b"\r" in body:
            body = self._unify(body)
        *blocks, self._rest = (self._rest + body).split(b"\n\n")
        return [data for block in blocks if (data := data_of(block)) is not None]

    def _unify(self, body: bytes) -> bytes:
        """Every line end as LF. A CR ends its line at once; an LF that follows it later belongs to it."""
        if self._after_return and body.startswith(b"\n"):
            body = body[1:]
            self._after_return = False
        if body:
            self._after_return = body.endswith(b"\r")
        return body.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def data_of(block: bytes) -> bytes | None:
    """An event's data, or None if it has none."""
    if block.startswith(b"data: ") and b"\n" not in block:
        return block[6:]
    values = [line[5:] for line in block.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(value.removeprefix(b" ") for value in values) if values else None
