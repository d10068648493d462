"""Sampler: from logits to tokens. A token is a function of the logits, the request's parameters, its seed and the
position, and of nothing else, so it does not matter who shares the batch or how often a step is repeated.

For each position, in this order:
  1. log probabilities are taken from the untouched logits, if asked for
  2. what the request bans, favours or penalizes is changed (logits_processors.py)
  3. the token is chosen (the op `sample`: see `kernels/sampling.py`)

For a beam no token is chosen. The likeliest ones that are not banned are reported instead, by the log probabilities of
the untouched logits; the scheduler chooses among those of all beams of a group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.core.beam_group import num_candidates
from quire.core.plan import Candidates, TokenLogprobs
from quire.core.request import Request
from quire.engine.batch import Samples
from quire.engine.logits_processors import Position, process_logits, to_device
from quire.engine.sampling_state import SamplingState
from quire.kernels import Kernels
from quire.models.decoder import Decoder


class Sampler:
    """Chooses the tokens of a step's samples."""

    def __init__(self, model: Decoder, state: SamplingState, ops: Kernels) -> None:
        self.model = model
        self.state = state
        self.ops = ops

    def choose(self, samples: Samples, hidden: Tensor) -> Choice:
        """hidden [n or more, hidden_size], of the samples in their order.

        How a sample is computed depends on its own request only, so its token does not depend on the other samples.
        """
        choice, left = self._choose_plain(samples, hidden)
        searched = [nth for nth, request in enumerate(samples.requests) if request.beam is not None]
        if searched:
            choice.searched, choice.beams = searched, self._search(samples, searched, hidden, choice.products)
        if self.state.asked.logprobs:
            choice.reported = [
                nth
                for nth, request in enumerate(samples.requests)
                if request.params.logprobs is not None and request.beam is None
            ]
        if left or choice.reported:
            self._choose_and_report(samples, hidden, left, choice)
        if self.state.processors:
            self._count(samples, choice)
        return choice

    def score(self, hidden: Tensor, targets: Sequence[int], num_top: int) -> LogprobsTensors:
        """Log probabilities of tokens that are there already, each after the position whose hidden state is given."""
        logprobs = torch.log_softmax(self.model.logits(hidden), -1)
        return gather_logprobs(logprobs, self._column(targets), num_top)

    def _choose_plain(self, samples: Samples, hidden: Tensor) -> tuple[Choice, list[int]]:
        """Tokens of samples that can be chosen without a look at all logits, and which samples are left."""
        plain = [nth for nth, request in enumerate(samples.requests) if request.argmax_only]
        left = [nth for nth, request in enumerate(samples.requests) if not request.argmax_only and request.beam is None]
        found = self.model.argmax(hidden, plain) if plain else ([], [])
        tokens = torch.tensor(found[0], dtype=torch.int64, device=hidden.device)
        largest = torch.tensor(found[1], device=hidden.device)
        if len(plain) == len(samples):
            return Choice(tokens, largest), left
        choice = Choice(tokens.new_zeros(len(samples)), largest.new_zeros(len(samples)))
        choice.tokens[plain], choice.largest[plain] = tokens, largest
        return choice, left

    def _choose_and_report(self, samples: Samples, hidden: Tensor, left: list[int], choice: Choice) -> None:
        """Tokens of the samples that are left, and log probabilities, from logits that are computed once."""
        reported = choice.reported
        wanted = sorted({*left, *reported})
        logits = self._logits(hidden, choice.products, wanted)
        if reported:
            raw = logits if len(reported) == len(wanted) else logits[self._column(map(wanted.index, reported))]
            logprobs = torch.log_softmax(raw, -1)
        if left:
            mine = logits if len(left) == len(wanted) else logits[self._column(map(wanted.index, left))]
            self._choose_from_logits(samples, left, mine, choice)
        if reported:
            most = max(samples.requests[nth].params.logprobs or 0 for nth in reported)
            choice.report = gather_logprobs(logprobs, choice.tokens[self._column(reported)], most)

    def _choose_from_logits(self, samples: Samples, chosen: list[int], logits: Tensor, choice: Choice) -> None:
        """Tokens of some samples, from their logits [chosen, vocab] float32, which are used up."""
        self._process_logits(samples, chosen, logits)
        entries = self._column(samples.entries[nth] for nth in chosen)
        lengths = self._column(samples.lengths[nth] for nth in chosen)
        tokens, largest = self.ops.sample(logits, self.state.settings[entries], self.state.seeds[entries], lengths)
        index = self._column(chosen)
        choice.tokens[index], choice.largest[index] = tokens, largest

    def _search(self, samples: Samples, searched: list[int], hidden: Tensor, products: Tensor | None) -> BeamTensors:
        """What may follow each of the samples, which are of beams."""
        requests = [samples.requests[nth] for nth in searched]
        logits = self._logits(hidden, products, searched)
        raw = logprobs = torch.log_softmax(logits, -1)
        if any(request.processes_logits for request in requests):
            self._process_logits(samples, searched, logits)
            logprobs = raw.masked_fill(logits == -torch.inf, -torch.inf)
        most = min(max(map(num_candidates, requests)), logprobs.shape[1])
        tokens = sort_keys(logprobs).topk(most, largest=False).values & 0xFFFFFFFF  # equals by id, whatever `most` is
        values = logprobs.gather(1, tokens)
        most = max(request.params.logprobs or 0 for request in requests)
        top = top_tokens(raw, min(most, raw.shape[1]))
        ranks = torch.arange(1, tokens.shape[1] + 1, device=tokens.device).expand_as(tokens)
        if most and raw is not logprobs:
            ranks = torch.stack([(raw > column[:, None]).sum(1) + 1 for column in values.unbind(1)], 1)
        return BeamTensors(tokens, values, ranks, top, raw.gather(1, top))

    def _logits(self, hidden: Tensor, products: Tensor | None, chosen: list[int]) -> Tensor:
        """Logits of some samples, [chosen, vocab] float32, in memory of their own."""
        index = self._column(chosen)
        return self.model.logits(hidden[index]) if products is None else self.model.head.cap(products[index])

    def _process_logits(self, samples: Samples, chosen: list[int], logits: Tensor) -> None:
        """Do to the logits of some samples what their requests ask for. One that has ended asks for nothing."""
        changed = [
            row
            for row, nth in enumerate(chosen)
            if samples.requests[nth].processes_logits and not samples.requests[nth].finished
        ]
        if not changed:
            return
        positions = [self._position(samples, chosen[row]) for row in changed]
        if len(changed) == len(chosen):
            process_logits(logits, positions, self.state.counts, self.ops)
            return
        index = self._column(changed)
        mine = logits[index]
        process_logits(mine, positions, self.state.counts, self.ops)
        logits[index] = mine

    def _position(self, samples: Samples, nth: int) -> Position:
        request, num_drafts = samples.requests[nth], samples.nums_drafts[nth]
        assert not num_drafts or request.constraint is None, "a constraint knows no drafts"
        if request.needs_tokens:
            assert len(request.tokens) + num_drafts == samples.lengths[nth], "a token that the host has not seen yet"
        return Position(request, self.state.processor_of(request), samples.lengths[nth], request.drafts[:num_drafts])

    def _count(self, samples: Samples, choice: Choice) -> None:
        """Tokens of requests that penalize. Where drafts are verified, the host counts what is accepted."""
        rows: dict[int, int] = {}
        for nth, request in enumerate(samples.requests):
            processor = self.state.processors.get(request)
            if processor is not None and processor.row is not None and not request.drafts:
                rows[nth] = processor.row
                processor.num_counted += 1
        if rows:
            self.state.counts.add(self._column(rows.values()), choice.tokens[self._column(rows)])

    def _column(self, numbers: Iterable[int]) -> Tensor:
        return to_device(list(numbers), np.int64, self.ops.device)


@dataclass(slots=True)
class Choice:
    """What was chosen for a step's samples, on the model's device."""

    tokens: Tensor  # [n] int64
    largest: Tensor  # [n] float32: the largest logit; if it is not finite, no token is left
    reported: list[int] = field(default_factory=list)  # samples whose log probabilities were asked for
    report: LogprobsTensors | None = None
    searched: list[int] = field(default_factory=list)  # samples of beams, for which no token is chosen
    beams: BeamTensors | None = None
    products: Tensor | None = None  # [n, vocab], of the head, if they were computed for all samples


class BeamTensors(NamedTuple):
    """The likeliest tokens of some beams; all on the logits' device."""

    tokens: Tensor  # [n, candidates] int64: those that may come next, likeliest first
    values: Tensor  # [n, candidates] float32: their log probabilities; minus infinity if no more may come
    ranks: Tensor  # [n, candidates] int64: among all tokens, from 1
    top: Tensor  # [n, most] int64: the likeliest of all tokens
    top_values: Tensor  # [n, most] float32


class LogprobsTensors(NamedTuple):
    """Log probabilities of a row's token and of the likeliest ones, for some rows; all on the logits' device."""

    own: Tensor  # [n] float32
    ranks: Tensor  # [n] int64: how many are likelier, and one
    top: Tensor  # [n, most] int64, likeliest first
    values: Tensor  # [n, most] float32


def gather_logprobs(logprobs: Tensor, tokens: Tensor, num_top: int) -> LogprobsTensors:
    """logprobs [n, vocab], tokens [n]. What is said of a row does not depend on the others."""
    own = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > own).sum(1) + 1
    top = top_tokens(logprobs, min(num_top, logprobs.shape[1]))
    return LogprobsTensors(own[:, 0], ranks, top, logprobs.gather(1, top))


def top_tokens(logprobs: Tensor, count: int) -> Tensor:
    """logprobs [n, vocab] -> the likeliest tokens of each row, [n, count].

    On a GPU the order of equals would depend on the number of rows, so there they are told apart by their ids.
    """
    if not logprobs.is_cuda or not count:
        return logprobs.topk(count).indices
    return sort_keys(logprobs).topk(count, largest=False).values & 0xFFFFFFFF


def sort_keys(logprobs: Tensor) -> Tensor:
    """logprobs [n, vocab] -> numbers with ids in their lower halves that rise from the likeliest token on, of equals
    from the lowest id: a logarithm of a probability is not above zero, so its bits without the sign rise as it falls.
    """
    order = (logprobs.view(torch.int32) & 0x7FFFFFFF).long() << 32
    return order | torch.arange(logprobs.shape[1], device=logprobs.device)


def to_token_logprobs(reported: LogprobsTensors, tokens: Sequence[int], nums_top: Sequence[int]) -> list[TokenLogprobs]:
    """A report that is on the host, for rows that asked for so many of the likeliest tokens."""
    own, ranks, top, values = (part.tolist() for part in reported)
    return [
        TokenLogprobs(
            (token, own[row], ranks[row]),
            [(other, values[row][place], place + 1) for place, other in enumerate(top[row][:num_top])],
        )
        for row, (token, num_top) in enumerate(zip(tokens, nums_top, strict=True))
    ]


def to_candidates(reported: BeamTensors, requests: Sequence[Request]) -> list[Candidates]:
    """The same for beams: what may follow each of them."""
    tokens, values, ranks, top, top_values = (part.tolist() for part in reported)
    found: list[Candidates] = []
    for row, request in enumerate(requests):
        candidates = zip(tokens[row][: num_candidates(request)], values[row], ranks[row], strict=False)
        likeliest_tokens = zip(top[row][: request.params.logprobs or 0], top_values[row], strict=False)
        found.append(
            Candidates(
                [each for each in candidates if math.isfinite(each[1])],
                [(token, value, place + 1) for place, (token, value) in enumerate(likeliest_tokens)],
            )
        )
    return found
