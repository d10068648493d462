"""Prompts of a wanted length that no cache has seen, unless they are meant to share a beginning.

Text is drawn at random from common words, most of them one token in most vocabularies. Every stretch of it has a key
and is a function of (seed, key), so requests that name the same blocks get the same words, and others do not.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from quire.bench.traces import BLOCK_TOKENS, Entry

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
