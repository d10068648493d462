"""Prompts of a wanted length that no cache has seen, unless they are meant to share a beginning.

Text is drawn at random from common words, most of them one token in most vocabularies. Every stretch of it has a key
and is a function of (seed, key), so requests that name the same blocks get the same words, and others do not.


The requests of a measurement: random prompts of one size or a trace's, and those before the clock starts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from quire.bench.serve.client import Form, Question, ask_once
from quire.bench.serve.http_client import Pool
from quire.bench.serve.metrics import Record
from quire.bench.serve.settings import NUM_REQUESTS, OUTPUT_TOKENS, PROMPT_WORDS, Settings
from quire.bench.serve.traces import BLOCK_TOKENS, Entry, Excerpt, excerpt, read_trace
from quire.errors import EngineError

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
class Ratio:
    """How many tokens a server counts for a prompt: `base` for every prompt and `per_word` for every word."""

    base: float
    per_word: float

    @classmethod
    def measured(cls, few: tuple[int, int], many: tuple[int, int]) -> Ratio:
        """From two prompts, each as (words, tokens)."""
        per_word = (many[1] - few[1]) / (many[0] - few[0])
        return cls(few[1] - per_word * few[0], per_word)

    def words(self, tokens: int) -> int:
        return max(1, round((tokens - self.base) / self.per_word))


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes prompts. With the same seed it writes the same ones."""

    seed: int

    def words(self, key: str, count: int) -> str:
        return " ".join(self._draw(WORDS, [(key, count)]))

    def token_ids(self, key: str, count: int) -> list[int]:
        return list(self._draw(TOKEN_IDS, [(key, count)]))

    def trace_words(self, key: str, entry: Entry, ratio: Ratio) -> str:
        size = ratio.words(entry.prompt_tokens)
        return " ".join(self._draw(WORDS, stretches(key, entry.blocks, size, BLOCK_TOKENS / ratio.per_word)))

    def trace_ids(self, key: str, entry: Entry) -> list[int]:
        return list(self._draw(TOKEN_IDS, stretches(key, entry.blocks, entry.prompt_tokens, BLOCK_TOKENS)))

    def _draw(self, units: Sequence[Unit], parts: list[tuple[str, int]]) -> Iterator[Unit]:
        for key, count in parts:
            # Draws are made one by one, so a shorter stretch is the beginning of a longer one with the same key.
            yield from random.Random(f"{self.seed} {key}").choices(units, k=count)


def stretches(key: str, blocks: Sequence[int], size: int, block_size: float) -> list[tuple[str, int]]:
    """A prompt of `size` units as (key, units): one stretch for each block, and one of its own for what they leave."""
    ends = [min(size, round(block_size * number)) for number in range(len(blocks) + 1)]
    lengths = [end - start for start, end in pairwise(ends)]
    shared = [(f"block {block}", length) for block, length in zip(blocks, lengths, strict=True) if length]
    return shared + ([(key, size - ends[-1])] if size > ends[-1] else [])


PROBE_WORDS = (50, 550)


def read_excerpt(settings: Settings) -> Excerpt | None:
    if settings.trace is None:
        return None
    return excerpt(
        read_trace(settings.trace),
        num_requests=settings.num_requests,
        max_prompt_tokens=settings.max_prompt_tokens,
        max_output_tokens=settings.max_output_tokens,
        speed=settings.trace_speed or 1.0,
    )


async def warm_up(settings: Settings, pool: Pool, form: Form) -> Ratio:
    """Requests that are not counted; for a trace in words, two of them find out how many tokens a word has."""
    writer = Writer(settings.seed)

    async def ask(key: str, num_words: int, max_tokens: int) -> Record:
        question = form.fill(0, writer.words(key, num_words), max_tokens)
        return await ask_once(pool, question, settings.timeout)

    for number in range(settings.warmup):
        await ask(f"warm-up {number}", PROMPT_WORDS, 2)
    if settings.trace is None or settings.trace_ids:
        return Ratio(0.0, 1.0)
    if settings.tokens_per_word is not None:
        return Ratio(0.0, settings.tokens_per_word)
    few, many = [(words, (await ask(f"probe {words}", words, 1)).prompt_tokens) for words in PROBE_WORDS]
    if few[1] is None or many[1] is None or many[1] <= few[1]:
        raise EngineError(
            f"{form.target.url(form.path)} does not count the tokens of prompts (no usage in its streams), so the "
            "trace's lengths cannot be met; give --tokens-per-word."
        )
    return Ratio.measured((few[0], few[1]), (many[0], many[1]))


def questions(settings: Settings, replayed: Excerpt | None, form: Form, ratio: Ratio) -> Iterator[Question]:
    """All requests of the measurement, each made when it is asked for."""
    writer = Writer(settings.seed)
    if replayed is not None:
        for number, entry in enumerate(replayed.entries):
            key = f"request {number}"
            prompt = writer.trace_ids(key, entry) if settings.trace_ids else writer.trace_words(key, entry, ratio)
            yield form.fill(number, prompt, entry.output_tokens)
        return
    for number in range(settings.num_requests or NUM_REQUESTS):
        key = f"request {number}"
        if settings.prompt_tokens is not None:
            prompt = writer.token_ids(key, settings.prompt_tokens)
        else:
            prompt = writer.words(key, settings.prompt_words or PROMPT_WORDS)
        yield form.fill(number, prompt, settings.output_tokens or OUTPUT_TOKENS)
