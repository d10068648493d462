"""A proposer that knows the answers and mixes wrong tokens into them, and how tests run requests beside it. It needs
no C++ kernels, so the tests on a GPU use it too."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from quire.core.drafts import ROOT, Drafts
from quire.core.plan import TokenLogprobs, Update
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.speculative.proposer import Context

Answer = tuple[list[int], list[TokenLogprobs]]
Make = Callable[[list[int], random.Random, int], Drafts]  # from the tokens ahead, for a vocabulary of some size


def run(engine: Engine, requests: Sequence[Request]) -> dict[str, Answer]:
    """Requests arrive a few at a time."""
    left, logprobs = list(requests), {request.id: list[TokenLogprobs]() for request in requests}

    def collect(updates: Sequence[Update]) -> None:
        for update in updates:
            if update.detail is not None:
                logprobs[update.id] += update.detail.logprobs or []

    while left or engine.has_work:
        for request in left[:3]:
            engine.add(request)
        del left[:3]
        collect(engine.step())
    return {request.id: (request.tokens[request.num_prompt :], logprobs[request.id]) for request in requests}


class Oracle:
    """Knows the answers, and mixes wrong tokens into them."""

    name = "oracle"

    def __init__(self, answers: dict[str, Answer], make: Make, vocab_size: int) -> None:
        self._answers = answers
        self._make = make
        self._vocab_size = vocab_size
        self._rng = random.Random(5)

    def propose(self, contexts: Sequence[Context], max_drafts: Sequence[int]) -> list[Drafts | None]:
        return [self._make(self._ahead(context), self._rng, self._vocab_size) for context in contexts]

    def _ahead(self, context: Context) -> list[int]:
        return self._answers[context.request_id][0][len(context.tokens) - context.num_prompt :]

    def finish(self, request_id: str) -> None:
        pass

    def reset(self) -> None:
        pass


def make_chain(ahead: list[int], rng: random.Random, vocab_size: int) -> Drafts:
    tokens = [token if rng.random() < 0.8 else rng.randrange(vocab_size) for token in ahead[: rng.randint(0, 6)]]
    return Drafts(tokens, None, [0.9] * len(tokens))


def make_tree(ahead: list[int], rng: random.Random, vocab_size: int) -> Drafts:
    """The answer is on a random path. Every node has a few wrong children."""
    tokens, parents, odds, parent = [], [], [], ROOT
    for right in ahead[: rng.randint(0, 5)]:
        children = [(right, True), *((rng.randrange(vocab_size), False) for _ in range(rng.randint(0, 2)))]
        rng.shuffle(children)
        following, seen = parent, set()
        for token, is_right in children:
            if token in seen or (token == right and not is_right) or (is_right and rng.random() < 0.1):
                continue
            seen.add(token)
            tokens.append(token)
            parents.append(parent)
            odds.append(rng.choice([0.5, 0.9, 0.95]))
            if is_right:
                following = len(tokens) - 1
        parent = following
    return Drafts(tokens, parents, odds)
