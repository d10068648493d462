"""`quire bench prefix`: what the prefix cache gains. The same requests with it and without it, on one engine in turns.

Two loads. Requests that begin with the same tokens, as with a system prompt: the shared share of the prompt grows. And
conversations: the prompt of each turn is all that was said before and a new message. Tokens are random, so nothing is
in the cache that the load has not put there.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quire.bench.in_process import TimedRequest, answer, answers, make_request
from quire.bench.serve.metrics import RequestRecord, summarize
from quire.config import EngineConfig
from quire.engine.client import InProcess
from quire.engine.machine import machine
from quire.errors import InvalidParams

Report = Callable[[int, int | None], None]
Document = dict[str, Any]
COUNTS = ("num_requests", "prompt_tokens", "output_tokens", "concurrency", "turns", "repeats")
SHOWN = ("ttft_ms", "tpot_ms", "e2e_ms", "requests_per_s", "output_tokens_per_s")


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop of `concurrency` requests. A turn of a conversation adds `message_tokens` to it.

    Everything runs `repeats` times with other tokens; each figure is the median.
    """

    shares: tuple[float, ...]
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    turns: int
    repeats: int
    seed: int = 5

    def __post_init__(self) -> None:
        for name in COUNTS:
            if getattr(self, name) < 1:
                raise InvalidParams(
                    f"--{name.replace('_', '-')} is {getattr(self, name)}; give a whole number of at least 1."
                )
        for share in self.shares:
            if not 0 <= share <= 1:
                raise InvalidParams(f"A share is {share:g}; give shares from 0 to 1, such as --shares 0,0.5,0.9.")

    @property
    def message_tokens(self) -> int:
        """Of a turn."""
        return max(1, self.prompt_tokens // self.turns)


@dataclass(frozen=True, slots=True)
class Pair:
    """The same requests with and without the cache, in the same order."""

    cached: list[RequestRecord]
    plain: list[RequestRecord]
    cached_answers: list[list[int]]
    plain_answers: list[list[int]]

    @property
    def num_different(self) -> int:
        return sum(a != b for a, b in zip(self.cached_answers, self.plain_answers, strict=True))


def run(config: EngineConfig, path: Path, load: Load, *, report: Report | None = None) -> Document:
    """Measure shared prefixes and conversations. `config` has the prefix cache on."""
    assert config.prefix_cache
    client = InProcess(config, path)
    if not client.engine.scheduler.kv.prefix_cache:
        raise InvalidParams(
            f"{config.model} keeps a state for each request, which no other request can share.", "model"
        )
    bench = Bench(client, load, report)
    bench.warm_up()
    rounds = [bench.run_round() for _ in range(load.repeats)]
    shared, turns = ([median(rows) for rows in zip(*each, strict=True)] for each in zip(*rounds, strict=True))
    return {
        "machine": machine(config),
        "model": config.model,
        "engine": client.info.summary,
        "load": {**asdict(load), "message_tokens": load.message_tokens},
        "shared": shared,
        "turns": turns,
        "different": bench.num_different,
    }


class Bench:
    """Runs loads with the prefix cache and without it. Which comes first alternates."""

    def __init__(self, client: InProcess, load: Load, report: Report | None) -> None:
        self._client = client
        self._load = load
        self._report = report
        self._rng = random.Random(load.seed)
        self._cached_first = False
        self._num_done = 0
        self.num_different = 0

    def warm_up(self) -> None:
        load = self._load
        prompts = [self._tokens(load.prompt_tokens) for _ in range(load.concurrency)]
        answer(self._client, [TimedRequest(None, make_request(f"{n}", p, 4)) for n, p in enumerate(prompts)])
        while self._client.engine.idle():
            pass

    def run_round(self) -> tuple[list[Document], list[Document]]:
        """A row for each share, and one for each turn."""
        return [self.share(share) for share in self._load.shares], self.converse()

    def share(self, share: float) -> Document:
        """Requests whose prompts begin with the same tokens."""
        load = self._load
        num_shared = round(share * load.prompt_tokens)
        system = self._tokens(num_shared)
        prompts = [system + self._tokens(load.prompt_tokens - num_shared) for _ in range(load.num_requests)]
        pair = self._compare(prompts)
        return {"share": share, **describe(pair.cached, pair.plain)}

    def converse(self) -> list[Document]:
        """Conversations, all of them turn by turn: a row for each turn."""
        load = self._load
        count = max(1, load.num_requests // load.turns)
        histories: list[list[int]] = [[] for _ in range(count)]
        rows = []
        for turn in range(load.turns):
            prompts = [history + self._tokens(load.message_tokens) for history in histories]
            pair = self._compare(prompts)
            histories = [prompt + reply for prompt, reply in zip(prompts, pair.plain_answers, strict=True)]
            rows.append({"turn": turn + 1, **describe(pair.cached, pair.plain)})
        return rows

    def _compare(self, prompts: Sequence[list[int]]) -> Pair:
        self._cached_first = not self._cached_first
        runs = {
            with_cache: self._answer(prompts, with_cache) for with_cache in (self._cached_first, not self._cached_first)
        }
        (cached, cached_answers), (plain, plain_answers) = runs[True], runs[False]
        pair = Pair(cached, plain, cached_answers, plain_answers)
        self.num_different += pair.num_different
        return pair

    def _answer(self, prompts: Sequence[list[int]], with_cache: bool) -> tuple[list[RequestRecord], list[list[int]]]:
        self._client.engine.scheduler.kv.prefix_cache = with_cache  # the engine has no requests
        load = self._load
        requests = [
            TimedRequest(None, make_request(f"{number}", prompt, load.output_tokens))
            for number, prompt in enumerate(prompts)
        ]
        records = answer(self._client, requests, concurrency=load.concurrency, on_end=self._count)
        return records, answers(requests)

    def _count(self, record: RequestRecord) -> None:
        self._num_done += 1
        if self._report:
            self._report(self._num_done, num_requests(self._load))

    def _tokens(self, count: int) -> list[int]:
        return self._rng.choices(range(self._client.info.config.vocab_size), k=count)


def num_requests(load: Load) -> int:
    """Of the whole measurement."""
    num_in_turns = load.turns * max(1, load.num_requests // load.turns)
    return 2 * load.repeats * (len(load.shares) * load.num_requests + num_in_turns)


def describe(cached: Sequence[RequestRecord], plain: Sequence[RequestRecord]) -> Document:
    """Figures with and without the cache. `hit_rate`: prompt tokens from the cache as a share of all."""
    summaries = {"with": summarize(cached, {}), "without": summarize(plain, {})}
    num_prompt = sum(record.prompt_tokens or 0 for record in cached)
    num_cached = sum(record.cached_tokens or 0 for record in cached)
    return {
        "num_requests": len(cached),
        "prompt_tokens": num_prompt,
        "cached_tokens": num_cached,
        "hit_rate": num_cached / num_prompt,
        **{name: {figure: summary[figure] for figure in SHOWN} for name, summary in summaries.items()},
    }


def median(rows: Sequence[Any]) -> Any:
    """Documents of the same form as one, with the median of each number."""
    if isinstance(rows[0], dict):
        return {name: median([row[name] for row in rows]) for name in rows[0]}
    known = [row for row in rows if row is not None]
    return statistics.median(known) if known else None
