"""Replays a recording on an engine in this process, at the recorded times, and records what comes of it.

What a request asks for, its seed and its place among the samples of its prompt are the recorded ones. An answer that
something ended from outside (a stop string, a client that left) is computed as far as it was recorded. An anonymous
recording is replayed with made up tokens: equal blocks are equal, and answers have their recorded lengths.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from quire import __version__
from quire.config import EngineConfig
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.client import InProcess
from quire.engine.recorder import Recorder
from quire.errors import InvalidParams, InvalidRequest
from quire.store.digest import digest_of
from quire.text.grammar.constraint import GrammarBackend
from quire.text.input_processor import InputProcessor
from quire.text.tokenizers.tokenizer import load_tokenizer
from quire.trace.anonymous import restore_params
from quire.trace.format import FORMAT, PROMPT_BLOCK, VERSION, Close, Header, RecordingStart, decoder, encode
from quire.trace.recording import RecordedRequest, Recording, groups
from quire.trace.writer import TraceWriter

WAIT_S = 0.02  # the longest sleep before the next arrival
TOKEN_IDS = range(1_000, 20_000)  # for made up prompts: any vocabulary of today has these, and no special tokens there

Report = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The requests of one prompt, which arrive together. `at_s` counts from the first arrival of all."""

    at_s: float
    requests: list[RecordedRequest]


def arrivals(recording: Recording, speed: float) -> list[Arrivals]:
    if not recording.requests:
        raise InvalidParams(f"{recording.name} has no request in it that could be replayed.")
    together = groups(recording)
    begin = min(group[0].at for group in together)
    found = [Arrivals((group[0].at - begin) / speed, group) for group in together]
    return sorted(found, key=lambda arrival: arrival.at_s)


def num_wanted(request: RecordedRequest, *, anonymous: bool) -> int:
    """The length of an answer that must not, or cannot, be left to the model."""
    if request.params.get("use_beam_search"):  # it computes at least one token
        lengths = request.end.beam_lengths if request.end is not None else None
        return max(1, max(lengths) if lengths else request.max_tokens)
    return request.num_output if request.was_cut or anonymous else request.max_tokens


def prompt_of(request: RecordedRequest, vocab_size: int) -> list[int]:
    """The prompt, or tokens made up from its digests."""
    if request.prompt is not None:
        return request.prompt
    ids = TOKEN_IDS if vocab_size >= TOKEN_IDS.stop else range(vocab_size)
    tokens: list[int] = []
    for digest in request.blocks or []:
        tokens += random.Random(digest).choices(ids, k=PROMPT_BLOCK)
    return tokens[: request.num_prompt]


class RequestBuilder:
    """Makes the requests of a recording again, for one model."""

    def __init__(self, client: InProcess, config: EngineConfig, path: Path, *, anonymous: bool) -> None:
        tokenizer, info = load_tokenizer(path), client.info
        self._vocab_size, self._max_len = info.config.vocab_size, info.max_len
        self._anonymous = anonymous
        self._processor = InputProcessor(
            tokenizer,
            info.config.vocab_size,
            info.max_len,
            info.config.eos_token_ids,
            by_priority=config.order == "priority",
            has_exit=config.exit_head is not None,
        )
        self._processor.grammars = GrammarBackend(tokenizer, info.config.vocab_size, self._processor.end_token_ids)

    def build(self, group: Sequence[RecordedRequest]) -> list[Request]:
        leader = group[0]
        try:
            return self._build(leader, group, self._params(leader, len(group)))
        except InvalidRequest as error:
            raise InvalidParams(f"Request {leader.id} cannot be replayed on this engine: {error}") from None

    def _params(self, leader: RecordedRequest, num_answers: int) -> SamplingParams:
        params = replace(restore_params(leader.params), seed=leader.seed)
        if not params.use_beam_search:
            params = replace(params, n=num_answers)
        if self._anonymous:
            params = replace(params, ignore_eos=True, min_tokens=0, max_tokens=leader.max_tokens)
        return params

    def _build(
        self, leader: RecordedRequest, group: Sequence[RecordedRequest], params: SamplingParams
    ) -> list[Request]:
        tokens = prompt_of(leader, self._vocab_size)
        self._processor.check_params(params)
        self._processor.check_prompt(tokens, params, leader.priority)
        salt = leader.tenant.encode()
        built = self._processor.build(None, tokens, params, 0, leader.id, leader.priority, salt, leader.tenant)
        made: list[Request] = []
        for request, recorded in zip(built.requests, group, strict=False):
            wanted = min(num_wanted(recorded, anonymous=self._anonymous), self._max_len - len(tokens))
            made.append(
                replace(
                    request, id=recorded.id, seed=recorded.seed, max_tokens=wanted, leader=made[0] if made else None
                )
            )
        return made


def replay(
    recording: Recording,
    config: EngineConfig,
    path: Path,
    *,
    speed: float,
    report: Report,
    save: Path | None = None,
) -> Recording:
    """The recording of the replay, which is also written to `save`. With an infinite speed all requests arrive at
    once."""
    timed = arrivals(recording, speed)
    writer = TraceWriter(save) if save is not None else None
    try:
        client = InProcess(config, path)
        builder = RequestBuilder(client, config, path, anonymous=recording.header.anonymous)
        made = [(arrival.at_s, builder.build(arrival.requests)) for arrival in timed]
        begin_s = time.monotonic()
        recorder = Recorder(RecordingStart(begin_s=begin_s, key=b""), client.engine, config)
        client.engine.observers.append(recorder)
        replayed = Recording("the replay", header_of(config, path))
        if writer is not None:
            writer.add(replayed.header)
        for lines in take_steps(client, recorder, made, begin_s, report):
            for line in lines.splitlines():
                replayed.add(decoder.decode(line))
            if writer is not None:
                writer.write(lines)
        return replayed
    finally:
        if writer is not None:
            writer.close()


def header_of(config: EngineConfig, path: Path) -> Header:
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return Header(
        format=FORMAT, version=VERSION, quire=__version__, started=started, model=config.model, digest=digest_of(path)
    )


def take_steps(
    client: InProcess,
    recorder: Recorder,
    made: Iterable[tuple[float, list[Request]]],
    begin_s: float,
    report: Report,
) -> Iterator[bytes]:
    """Run until all requests have ended. Yields the lines of each step."""
    waiting = list(made)[::-1]
    num_requests, num_ended = sum(len(requests) for _, requests in waiting), 0
    report(0, num_requests)
    while waiting or client.engine.has_work:
        now_s = time.monotonic() - begin_s
        while waiting and waiting[-1][0] <= now_s:
            for request in waiting.pop()[1]:
                client.add(request)
        if client.engine.has_work:
            ended = sum(update.finish is not None for update in client.step())
            num_ended += ended
            if ended:
                report(num_ended, num_requests)
        else:
            time.sleep(min(WAIT_S, max(0.0, waiting[-1][0] - now_s)))
        yield recorder.take()
    yield encode(Close(at=round(time.monotonic() - begin_s, 6)))
