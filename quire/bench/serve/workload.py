"""The requests of a benchmark: prompts of a given length, random or from a trace, and the warm-up.

A prompt is random text of common words, most of them one token in most vocabularies. No cache has seen it, unless it
shares a prefix with another one: a segment is a function of (seed, key), so equal keys give equal text.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from quire.bench.serve.client import PreparedRequest, RequestTemplate, send_once
from quire.bench.serve.http_client import ConnectionPool
from quire.bench.serve.metrics import RequestRecord
from quire.bench.serve.settings import NUM_REQUESTS, OUTPUT_TOKENS, PROMPT_WORDS, Settings
from quire.bench.serve.traces import TraceRequest, TraceSlice, read_trace, slice_trace
from quire.errors import EngineError

PROBE_WORDS = (50, 550)

COMMON_WORDS = """
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room
mother area money story fact month right study book eye job word business issue side kind head house service
friend father power hour game line end member law car city community name president team minute idea body
information back parent face level office door health person art war history party result change morning
reason research girl moment air teacher force education foot boy age policy music market sense nation plan
college interest death experience effect use class control field development role effort rate heart drug show
leader light voice wife police mind price report decision son view relationship town road arm difference value
building action season society tax director position player record paper space ground form event official
matter center couple site project base star table need court oil situation cost industry figure street image
phone data picture practice piece land product doctor wall patient worker news test movie north love step film
tree source hair window culture chance brother energy period course summer plant opportunity term letter
condition choice rule daughter south husband floor campaign material population call economy hospital church
risk fire future bank west sport board subject officer rest behavior performance top goal second bed order
author blue green white black long short small large early late high low old new young
"""
WORDS = tuple(COMMON_WORDS.split())
TOKEN_IDS = range(1_000, 20_000)  # any vocabulary of today has these, and keeps its special tokens elsewhere

Unit = TypeVar("Unit", str, int)


@dataclass(frozen=True, slots=True)
class TokenRatio:
    """The tokens of a prompt: `base` for the prompt and `per_word` for each word."""

    base: float
    per_word: float

    @classmethod
    def from_two(cls, few: tuple[int, int], many: tuple[int, int]) -> TokenRatio:
        """From two prompts, each as (words, tokens)."""
        per_word = (many[1] - few[1]) / (many[0] - few[0])
        return cls(few[1] - per_word * few[0], per_word)

    def words(self, tokens: int) -> int:
        return max(1, round((tokens - self.base) / self.per_word))


@dataclass(frozen=True, slots=True)
class PromptGenerator:
    """Makes prompts. The same seed gives the same prompts."""

    seed: int

    def words(self, key: str, count: int) -> str:
        return " ".join(self._draw(WORDS, [(key, count)]))

    def token_ids(self, key: str, count: int) -> list[int]:
        return list(self._draw(TOKEN_IDS, [(key, count)]))

    def trace_words(self, key: str, entry: TraceRequest, ratio: TokenRatio) -> str:
        size = ratio.words(entry.prompt_tokens)
        return " ".join(self._draw(WORDS, segments(key, entry.blocks, size, entry.block_tokens / ratio.per_word)))

    def trace_ids(self, key: str, entry: TraceRequest) -> list[int]:
        return list(self._draw(TOKEN_IDS, segments(key, entry.blocks, entry.prompt_tokens, entry.block_tokens)))

    def _draw(self, units: Sequence[Unit], counts: list[tuple[str, int]]) -> Iterator[Unit]:
        for key, count in counts:
            # `choices` draws one by one, so a shorter segment is a prefix of a longer one with the same key.
            yield from random.Random(f"{self.seed} {key}").choices(units, k=count)


def segments(key: str, blocks: Sequence[int], size: int, block_size: float) -> list[tuple[str, int]]:
    """A prompt of `size` units as (key, units): one segment for each block, and a unique one for the rest."""
    ends = [min(size, round(block_size * number)) for number in range(len(blocks) + 1)]
    lengths = [end - start for start, end in pairwise(ends)]
    shared = [(f"block {block}", length) for block, length in zip(blocks, lengths, strict=True) if length]
    return shared + ([(key, size - ends[-1])] if size > ends[-1] else [])


def load_trace(settings: Settings) -> TraceSlice | None:
    if settings.trace is None:
        return None
    return slice_trace(
        read_trace(settings.trace),
        num_requests=settings.num_requests,
        max_prompt_tokens=settings.max_prompt_tokens,
        max_output_tokens=settings.max_output_tokens,
        speed=settings.trace_speed or 1.0,
    )


async def warmup(settings: Settings, pool: ConnectionPool, template: RequestTemplate) -> TokenRatio:
    """Send requests that are not measured. For a trace in words, two of them measure the tokens of a word."""
    generator = PromptGenerator(settings.seed)

    async def send(key: str, num_words: int, max_tokens: int) -> RequestRecord:
        request = template.make(0, generator.words(key, num_words), max_tokens)
        return await send_once(pool, request, settings.timeout)

    for number in range(settings.warmup):
        await send(f"warm-up {number}", PROMPT_WORDS, 2)
    if settings.trace is None or settings.trace_ids:
        return TokenRatio(0.0, 1.0)
    if settings.tokens_per_word is not None:
        return TokenRatio(0.0, settings.tokens_per_word)
    few, many = [(words, (await send(f"probe {words}", words, 1)).prompt_tokens) for words in PROBE_WORDS]
    if few[1] is None or many[1] is None or many[1] <= few[1]:
        raise EngineError(
            f"{template.target.url(template.path)} does not count the tokens of prompts (no usage in its streams), so "
            "the trace's lengths cannot be met; give --tokens-per-word."
        )
    return TokenRatio.from_two((few[0], few[1]), (many[0], many[1]))


def make_requests(
    settings: Settings, replayed: TraceSlice | None, template: RequestTemplate, ratio: TokenRatio
) -> Iterator[PreparedRequest]:
    """All requests of the measurement, made one by one as the iterator advances."""
    generator = PromptGenerator(settings.seed)
    if replayed is not None:
        for number, entry in enumerate(replayed.entries):
            key = f"request {number}"
            prompt = generator.trace_ids(key, entry) if settings.trace_ids else generator.trace_words(key, entry, ratio)
            yield template.make(number, prompt, entry.output_tokens)
        return
    for number in range(settings.num_requests or NUM_REQUESTS):
        key = f"request {number}"
        if settings.prompt_tokens is not None:
            prompt = generator.token_ids(key, settings.prompt_tokens)
        else:
            prompt = generator.words(key, settings.prompt_words or PROMPT_WORDS)
        yield template.make(number, prompt, settings.output_tokens or OUTPUT_TOKENS)
