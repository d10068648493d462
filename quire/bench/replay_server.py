"""Replays a recording on a running server with OpenAI's completions that returns token ids, as quire's does.

Each prompt is one request, at its recorded time, with the recorded parameters and seed. The steps of the server are not
known here; a recording of its own has them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from quire import event_loop
from quire.bench.replay import Arrivals, Report, arrivals, num_wanted
from quire.bench.serve.client import OK, find_model
from quire.bench.serve.http_client import ConnectionPool, RequestFailure, ResponseReader, Target
from quire.core.params import SamplingParams
from quire.errors import EngineError, InvalidParams
from quire.file_limit import raise_file_limit
from quire.trace.anonymous import restore_params
from quire.trace.format import FORMAT, VERSION, End, Header
from quire.trace.recording import RecordedRequest, Recording

PATH = "/v1/completions"
REQUEST_S = 600.0
MAX_DETAIL = 300
# Fields that are sent even where they are quire's defaults: the server's model may name others.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
SENT = (
    "min_tokens", "stop", "stop_token_ids", "ignore_eos", "bad_words", "allowed_token_ids", "logit_bias",
    "structured_outputs", "use_beam_search", "best_of", "length_penalty", "early_stopping", "early_exit",
)  # fmt: skip


class Choice(msgspec.Struct):
    index: int
    token_ids: list[int]
    finish_reason: str | None = None


class Answers(msgspec.Struct):
    choices: list[Choice]


def replay_on(recording: Recording, url: str, api_key: str | None, *, speed: float, report: Report) -> Recording:
    """The requests of the recording, with the server's answers."""
    if recording.header.anonymous:
        raise InvalidParams(
            "The recording is anonymous: replay it on an engine in this process, or send its load with quire bench "
            "serve --trace FILE --trace-ids."
        )
    timed = arrivals(recording, speed)
    raise_file_limit()
    return event_loop.run(send_all(recording, timed, Target.of(url, api_key), report))


async def send_all(recording: Recording, timed: Sequence[Arrivals], target: Target, report: Report) -> Recording:
    pool = ConnectionPool(target)
    try:
        model = await find_model(pool)
        header = Header(format=FORMAT, version=VERSION, quire="", started="", model=model, digest="")
        replayed = Recording(target.url(""), header)
        num_done, begin_s = 0, asyncio.get_running_loop().time()
        report(0, len(timed))

        async def send(arrival: Arrivals) -> None:
            nonlocal num_done
            await asyncio.sleep(begin_s + arrival.at_s - asyncio.get_running_loop().time())
            await send_group(pool, model, arrival.requests, replayed)
            num_done += 1
            report(num_done, len(timed))

        async with asyncio.TaskGroup() as tasks:
            for arrival in timed:
                tasks.create_task(send(arrival))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        pool.close()
    return replayed


async def send_group(pool: ConnectionPool, model: str, group: Sequence[RecordedRequest], replayed: Recording) -> None:
    body = msgspec.json.encode(make_body(model, group))
    pieces: list[bytes] = []

    def keep(_: ResponseReader, piece: bytes, __: float) -> None:
        pieces.append(piece)

    name = f"Request {group[0].id}"
    try:
        async with asyncio.timeout(REQUEST_S):
            reader = await pool.request(pool.target.post(PATH, body), keep)
    except (RequestFailure, TimeoutError) as error:
        reason = str(error) or f"no answer within {REQUEST_S:g} s"
        raise EngineError(f"{name} failed on {pool.target.url(PATH)}: {reason}") from None
    if reader.status != OK:
        raise EngineError(
            f"{name} got status {reader.status}: {b''.join(pieces)[:MAX_DETAIL].decode(errors='replace')}"
        )
    try:
        choices = msgspec.json.decode(b"".join(pieces), type=Answers).choices
    except msgspec.MsgspecError as error:
        raise EngineError(
            f"{name}: {pool.target.url(PATH)} returned no token ids ({error}), so nothing can be compared."
        ) from None
    keep_answers(group, choices, replayed)


def make_body(model: str, group: Sequence[RecordedRequest]) -> dict[str, Any]:
    leader = group[0]
    params = restore_params(leader.params)
    body: dict[str, Any] = {"model": model, "prompt": leader.prompt, "return_token_ids": True, "seed": leader.seed}
    body["n"] = params.n if params.use_beam_search else len(group)
    body["max_tokens"] = max(num_wanted(request, anonymous=False) for request in group)
    if leader.priority:
        body["priority"] = leader.priority
    names = SENT if params.use_beam_search else SAMPLING + SENT
    body |= {name: leader.params.get(name, getattr(params, name)) for name in names if differs(params, name)}
    return {**body, "min_tokens": min(params.min_tokens, body["max_tokens"])} if params.min_tokens else body


def differs(params: SamplingParams, name: str) -> bool:
    return name in SAMPLING or getattr(params, name) != getattr(SamplingParams(), name)


def keep_answers(group: Sequence[RecordedRequest], choices: Sequence[Choice], replayed: Recording) -> None:
    """An answer of the server that ended at a stop string has the tokens of that string as well."""
    for index, request in enumerate(group):
        answers = [choice for choice in choices if choice.index == index]
        beams = [choice.token_ids for choice in choices] if request.params.get("use_beam_search") else None
        tokens = answers[0].token_ids if answers and beams is None else []
        finish = "abort" if request.was_cut else (answers[0].finish_reason or "error") if answers else "error"
        end = End(id=request.id, at=0.0, finish=finish, beams=beams)
        kept = replace(request, tokens=tokens, num_output=len(tokens), token_steps=[None] * len(tokens), end=end)
        replayed.requests[request.id] = kept
