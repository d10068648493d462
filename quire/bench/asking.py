"""Putting a question to the server and writing down what came of it: one request from bytes to Record."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import msgspec

from quire.bench.answers import OK, Answer, show
from quire.bench.connections import Failure, Pool
from quire.bench.measures import UNFINISHED, Record
from quire.bench.wire import ResponseReader, Target
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
