"""The requests of a measurement: random prompts of one size or a trace's, and those before the clock starts."""

from __future__ import annotations

from collections.abc import Iterator

from quire.bench.asking import Form, Question, ask_once
from quire.bench.connections import Pool
from quire.bench.measures import Record
from quire.bench.prompts import Ratio, Writer
from quire.bench.settings import NUM_REQUESTS, OUTPUT_TOKENS, PROMPT_WORDS, Settings
from quire.bench.traces import Excerpt, excerpt, read_trace
from quire.errors import EngineError

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
