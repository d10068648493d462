"""Guard: calls proposers, and bounds what a faulty one can do.

Plug-ins are code of the user. They see the engine's token lists through read-only views, and their answers are checked
and copied. A proposer that raises, or breaks the rules, repeatedly is no longer called; one that fails while it forgets
requests is dropped at once, because it may mix them up.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import overload

from quire.core.drafts import ROOT, Drafts
from quire.core.request import Request
from quire.speculative.proposer import Context, ModelProposer, Proposer

log = logging.getLogger("quire.speculative")

MAX_FAILURES = 3  # of a proposer, until it is no longer called


class TokensView(Sequence[int]):
    """A list of tokens that cannot be changed."""

    __slots__ = ("_tokens",)

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return self._tokens[index]  # a slice is a copy


class Guard:
    """The proposers that are called: quire's own, plug-ins, and models."""

    def __init__(
        self,
        proposers: Sequence[Proposer],
        plugins: Sequence[Proposer],
        models: Sequence[ModelProposer],
        vocab_size: int,
    ) -> None:
        self.proposers = [*proposers, *plugins]
        self.models = list(models)
        self._plugins = list(plugins)
        self._vocab_size = vocab_size
        self._failures: Counter[str] = Counter()

    def propose(
        self, rows: Sequence[Request], limits: Sequence[int], clock: Callable[[], float]
    ) -> tuple[list[list[Drafts]], float]:
        """For each request the drafts of all proposers, those without any left out. And the seconds that plug-ins took:
        quire's own proposers are bounded."""
        if not self.proposers:
            return [[] for _ in rows], 0.0
        contexts = [
            Context(row.id, row.tokens, row.num_prompt, row.salt, row.prediction)
            for row in rows
        ]  # fmt: skip
        proposed: list[list[Drafts]] = [[] for _ in rows]
        plugin_s = 0.0
        for proposer in list(self.proposers):
            begin_s, is_plugin = clock(), proposer in self._plugins
            found = self._call(proposer, contexts, limits, is_plugin)
            plugin_s += clock() - begin_s if is_plugin else 0.0
            for own, drafts in zip(proposed, found, strict=False):
                if drafts is not None and len(drafts):
                    drafts.source = proposer.name
                    own.append(drafts)
        return proposed, plugin_s

    def _call(
        self, proposer: Proposer, contexts: Sequence[Context], limits: Sequence[int], is_plugin: bool
    ) -> list[Drafts | None]:
        try:
            if is_plugin:
                found = proposer.propose([read_only(context) for context in contexts], list(limits))
                return checked(found, limits, self._vocab_size)
            return proposer.propose(contexts, limits)
        except Exception as error:
            self._failures[proposer.name] += 1
            failures = self._failures[proposer.name]
            log.error("the proposer %r failed: %s", proposer.name, error, exc_info=failures == 1)
            if failures >= MAX_FAILURES:
                log.error("the proposer %r has failed %d times and is no longer called", proposer.name, failures)
                self.proposers.remove(proposer)
            return []

    def drop_model(self, model: ModelProposer) -> None:
        """Called while its exception is handled."""
        log.exception("the model %r failed and is no longer asked for drafts", model.name)
        self.models.remove(model)

    def finish(self, request_id: str, was_proposed: bool) -> None:
        """A request has ended. `was_proposed`: the proposers have seen it."""
        for proposer in list(self.proposers) if was_proposed else ():
            with self._forgetting(proposer):
                proposer.finish(request_id)
        for model in list(self.models):
            with self._forgetting(model):
                model.finish(request_id)

    def reset(self) -> None:
        everyone: list[Proposer | ModelProposer] = [*self.proposers, *self.models]
        for proposer in everyone:
            with self._forgetting(proposer):
                proposer.reset()

    @contextmanager
    def _forgetting(self, proposer: Proposer | ModelProposer) -> Iterator[None]:
        try:
            yield
        except Exception:
            log.exception("the proposer %r failed and is no longer called", proposer.name)
            self.proposers = [each for each in self.proposers if each is not proposer]
            self.models = [each for each in self.models if each is not proposer]


def read_only(context: Context) -> Context:
    return context._replace(tokens=TokensView(context.tokens), prediction=TokensView(context.prediction))


def checked(found: Sequence[Drafts | None], limits: Sequence[int], vocab_size: int) -> list[Drafts | None]:
    """A copy of a plug-in's answer, which it may change later. Raises if the answer is malformed."""
    if len(found) != len(limits):
        raise ValueError(f"It returned {len(found)} drafts for {len(limits)} requests.")
    return [
        None if drafts is None else checked_drafts(drafts, max(0, limit), vocab_size)
        for drafts, limit in zip(found, limits, strict=True)
    ]


def checked_drafts(drafts: Drafts, limit: int, vocab_size: int) -> Drafts:
    """The first `limit` of the nodes. What follows them is not looked at."""
    if drafts.odds and len(drafts.odds) != len(drafts.tokens):
        raise ValueError(f"It returned {len(drafts.odds)} odds for {len(drafts.tokens)} tokens.")
    if drafts.parents is not None and len(drafts.parents) != len(drafts.tokens):
        raise ValueError(f"It returned {len(drafts.parents)} parents for {len(drafts.tokens)} tokens.")
    tokens = list(drafts.tokens[:limit])
    parents = None if drafts.parents is None else list(drafts.parents[:limit])
    if not all(type(token) is int for token in [*tokens, *(parents or ())]):
        raise ValueError("Tokens and parents must be of type int.")
    if not all(0 <= token < vocab_size for token in tokens):
        raise ValueError(f"A token is not in the vocabulary of {vocab_size}.")
    if parents is not None:
        if any(not ROOT <= parent < node for node, parent in enumerate(parents)):
            raise ValueError("A parent must be ROOT or an earlier node, one for each token.")
        if len(set(zip(parents, tokens, strict=True))) != len(tokens):
            raise ValueError("Two children of a node have the same token.")
    return Drafts(tokens, parents, [float(each) for each in drafts.odds[:limit]])
