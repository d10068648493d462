"""Proposers that know the answers and use that for good or for bad, for tests of what any proposer can do."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.core.drafts import ROOT, Drafts
from quire.core.plan import Hypothesis, TokenLogprobs, Update
from quire.core.request import Finish
from quire.speculative.proposer import Context
from tests.tools.oracle import make_chain, make_tree
from tests.tools.random_requests import VOCAB_SIZE


@dataclass
class Answer:
    """All that a client is told."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    beams: list[Hypothesis] | None = None
    finish: Finish | None = None

    def add(self, update: Update) -> None:
        self.tokens += update.tokens
        self.finish = update.finish or self.finish
        if update.detail is not None:
            self.logprobs += update.detail.logprobs or []
            self.prompt_logprobs += update.detail.prompt_logprobs or []
            self.beams = update.detail.beams or self.beams


Answers = dict[str, Answer]
Propose = Callable[[list[int], int, random.Random], Drafts | None]  # from the tokens ahead and the limit


def wrong(tokens: Sequence[int]) -> list[int]:
    return [(token + 1) % VOCAB_SIZE for token in tokens]


def chain(tokens: Sequence[int], odds: Any = 0.9) -> Drafts:
    return Drafts(list(tokens), None, [odds] * len(tokens))


def fail(ahead: list[int], most: int, rng: random.Random) -> Drafts:
    raise RuntimeError("no drafts today")


# Those that keep the rules are called to the end. The others are no longer called after a few steps.
PROPOSE: dict[str, Propose] = {
    "chains": lambda ahead, most, rng: make_chain(ahead, rng, VOCAB_SIZE),
    "trees": lambda ahead, most, rng: make_tree(ahead, rng, VOCAB_SIZE),
    "right": lambda ahead, most, rng: chain(ahead[:most]),
    "wrong": lambda ahead, most, rng: chain(wrong(ahead[:most])),
    "random": lambda ahead, most, rng: chain([rng.randrange(VOCAB_SIZE) for _ in range(most)], rng.random()),
    "lying odds": lambda ahead, most, rng: chain(
        ahead[:most] if rng.random() < 0.5 else wrong(ahead[:most]), rng.choice([-3.0, 1e9, float("nan"), float("inf")])
    ),
    "without odds": lambda ahead, most, rng: Drafts(ahead[:most]),
    "far too many": lambda ahead, most, rng: chain([*ahead[:3], 5] * 2500),
    "beyond the end": lambda ahead, most, rng: chain([*ahead, *[7] * 12]),
}
BREAKS_RULES: dict[str, Propose] = {
    "raises": fail,
    "twins": lambda ahead, most, rng: Drafts([5, 5], [ROOT, ROOT], [0.9, 0.9]),
    "wrong order": lambda ahead, most, rng: Drafts([5, 6], [1, ROOT], [0.9, 0.9]),
    "out of range": lambda ahead, most, rng: chain([*ahead[:2], rng.choice([-1, VOCAB_SIZE, 1 << 40])]),
    "floats": lambda ahead, most, rng: chain([5.0]),  # type: ignore[list-item]
    "no drafts at all": lambda ahead, most, rng: "drafts",  # type: ignore[dict-item]
}


class Plugin:
    """Knows the answers and uses that for good or for bad."""

    def __init__(self, name: str, answers: Answers, seed: int, raises_in: str = "") -> None:
        self.name = name
        self._propose = (PROPOSE | BREAKS_RULES)[name]
        self._answers = answers
        self._rng = random.Random(seed)
        self._raises_in = raises_in

    def propose(self, contexts: Sequence[Context], max_drafts: Sequence[int]) -> list[Drafts | None]:
        found = []
        for context, most in zip(contexts, max_drafts, strict=True):
            ahead = self._answers[context.request_id].tokens[len(context.tokens) - context.num_prompt :]
            found.append(self._propose(ahead, most, self._rng))
        return found

    def finish(self, request_id: str) -> None:
        self._raise("finish")

    def reset(self) -> None:
        self._raise("reset")

    def _raise(self, method: str) -> None:
        if self._raises_in == method and self._rng.random() < 0.2:
            raise RuntimeError(f"{method} does not work today")
