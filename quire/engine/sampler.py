"""Sampler: from logits to tokens. A token depends on the logits, the request's parameters, its seed and the position
only. It does not depend on the other requests of the batch, and a repeated step samples the same token.

For each sample, in this order:
  1. log probabilities are computed from the raw logits, if the request has `logprobs`
  2. the request's logits processors are applied (`logits_processors.py`)
  3. the token is sampled (the op `sample`: see `kernels/sampling.py`)

For a beam no token is sampled. Its candidates are the likeliest tokens that are not banned, by raw log probabilities.
The scheduler selects among the candidates of all beams of a group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.core.beam_group import num_candidates
from quire.core.drafts import ROOT
from quire.core.plan import Candidates, TokenLogprobs
from quire.core.request import Request
from quire.engine.batch import Samples
from quire.engine.logits_processors import SampleContext, process_logits
from quire.engine.sampling_state import SamplingState
from quire.kernels import Kernels
from quire.kernels.arrays import Array
from quire.layers.embedding import Head


class Sampler:
    """Samples the tokens of a step."""

    def __init__(self, head: Head, state: SamplingState, ops: Kernels) -> None:
        self.head = head
        self.state = state
        self.ops = ops

    def sample(self, samples: Samples, hidden: Array) -> SamplerOutput:
        """hidden [n or more, hidden_size], in the order of the samples.

        How a sample is computed depends on its own request only, so its token does not depend on the other samples.
        """
        output, rest = self._sample_plain(samples, hidden)
        beam_indices = [nth for nth, request in enumerate(samples.requests) if request.beam is not None]
        if beam_indices:
            output.beam_indices = beam_indices
            output.beams = self._beam_candidates(samples, beam_indices, hidden, output.products)
        if self.state.flags.logprobs:
            output.logprobs_indices = [
                nth
                for nth, request in enumerate(samples.requests)
                if request.params.logprobs is not None and request.beam is None
            ]
        if rest or output.logprobs_indices:
            self._sample_rest(samples, hidden, rest, output)
        if self.state.processors:
            self._count_tokens(samples, output)
        return output

    def score(self, hidden: Array, targets: Sequence[int], num_top: int) -> LogprobsArrays:
        """Log probabilities of prompt tokens. hidden [targets, hidden_size]: the states of the tokens before them."""
        return LogprobsArrays(*self.ops.logprobs(self.head(hidden), self._put(targets), num_top))

    def _sample_plain(self, samples: Samples, hidden: Array) -> tuple[SamplerOutput, list[int]]:
        """Sample by a fused argmax where no logits are needed. Returns the indices of the other samples too."""
        plain = [nth for nth, request in enumerate(samples.requests) if request.argmax_only]
        rest = [nth for nth, request in enumerate(samples.requests) if not request.argmax_only and request.beam is None]
        found = self.head.weight.argmax(hidden, plain) if plain else ([], [])
        arrays, count = self.ops.arrays, len(samples)
        tokens, max_logits = arrays.put(found[0], "int64"), arrays.put(found[1], "float32")
        if len(plain) == count:
            return SamplerOutput(tokens, max_logits), rest
        output = SamplerOutput(arrays.zeros((count,), "int64"), arrays.zeros((count,), "float32"))
        if plain:
            output.tokens[plain], output.max_logits[plain] = tokens, max_logits
        return output, rest

    def _sample_rest(self, samples: Samples, hidden: Array, rest: list[int], output: SamplerOutput) -> None:
        """Sample the rest, and gather log probabilities, from logits that are computed once."""
        scored = output.logprobs_indices
        needed = sorted({*rest, *scored})
        logits = self._logits(hidden, output.products, needed)
        is_processed = any(samples.requests[nth].processes_logits for nth in scored)
        raw = logits
        if scored and (is_processed or len(scored) < len(needed)):
            raw = logits[self._put(map(needed.index, scored))]
        if rest:
            selected = logits if len(rest) == len(needed) else logits[self._put(map(needed.index, rest))]
            self._sample_from_logits(samples, rest, selected, output)
        if scored:
            num_top = max(samples.requests[nth].params.logprobs or 0 for nth in scored)
            output.logprobs = LogprobsArrays(*self.ops.logprobs(raw, output.tokens[self._put(scored)], num_top))

    def _sample_from_logits(self, samples: Samples, indices: list[int], logits: Array, output: SamplerOutput) -> None:
        """Sample the tokens of some samples. logits [indices, vocab] float32 are overwritten."""
        self.process(samples, indices, logits)
        index = self._put(indices)
        output.tokens[index], output.max_logits[index] = self.draw(samples, indices, logits)

    def draw(self, samples: Samples, indices: list[int], logits: Array) -> tuple[Array, Array]:
        """Tokens and largest logits from logits that have been processed, and are overwritten."""
        entries = self._put(samples.entries[nth] for nth in indices)
        lengths = self._put(samples.lengths[nth] for nth in indices)
        found: tuple[Array, Array] = self.ops.sample(
            logits, self.state.settings[entries], self.state.seeds[entries], lengths
        )  # fmt: skip
        return found

    def _beam_candidates(
        self, samples: Samples, indices: list[int], hidden: Array, products: Array | None
    ) -> BeamArrays:
        """The candidates for the next token of some samples, which belong to beams."""
        requests = [samples.requests[nth] for nth in indices]
        logits, processed = self._logits(hidden, products, indices), None
        if any(request.processes_logits for request in requests):
            processed = self.ops.arrays.empty(tuple(logits.shape), "float32")
            self.ops.arrays.copy(processed, logits)
            self.process(samples, indices, processed)
        num_top = max(request.params.logprobs or 0 for request in requests)
        return BeamArrays(*self.ops.beam_candidates(logits, processed, max(map(num_candidates, requests)), num_top))

    def _logits(self, hidden: Array, products: Array | None, indices: list[int]) -> Array:
        """Logits of some samples, [indices, vocab] float32. They are a copy."""
        index = self._put(indices)
        return self.head(hidden[index]) if products is None else self.head.cap(products[index])

    def process(self, samples: Samples, indices: list[int], logits: Array) -> None:
        """Apply logits processors to the logits of some samples, in place. Finished requests are skipped."""
        processed = [
            row
            for row, nth in enumerate(indices)
            if samples.requests[nth].processes_logits and not samples.requests[nth].finished
        ]
        if not processed:
            return
        contexts = [self._context(samples, indices[row]) for row in processed]
        if len(processed) == len(indices):
            process_logits(logits, contexts, self.state.counts, self.ops)
            return
        index = self._put(processed)
        selected = logits[index]
        process_logits(selected, contexts, self.state.counts, self.ops)
        logits[index] = selected

    def _context(self, samples: Samples, nth: int) -> SampleContext:
        request, node = samples.requests[nth], samples.nodes[nth]
        drafts = [] if node == ROOT else samples.drafts[samples.rows[nth]].path_tokens(node)
        if request.needs_tokens:
            assert len(request.tokens) + len(drafts) == samples.lengths[nth], "a token is not on the host yet"
        processor = self.state.processor_of(request, self.ops)
        return SampleContext(request, processor, samples.lengths[nth], drafts)

    def _count_tokens(self, samples: Samples, output: SamplerOutput) -> None:
        """Count the tokens of requests with penalties. Accepted drafts are counted by the host (`count_known`)."""
        rows: dict[int, int] = {}
        for nth, request in enumerate(samples.requests):
            processor = self.state.processors.get(request)
            if processor is not None and processor.counts_row is not None and samples.rows[nth] not in samples.drafts:
                rows[nth] = processor.counts_row
                processor.num_counted += 1
        if rows:
            tokens = output.tokens[self._put(rows)]
            self.ops.count_tokens(self.state.counts.rows, self._put(rows.values()), tokens)

    def _put(self, numbers: Iterable[int]) -> Array:
        return self.ops.arrays.put(list(numbers), "int64")


@dataclass(slots=True)
class SamplerOutput:
    """The sampled tokens of a step. Indices are those of `Samples`."""

    tokens: Array  # [n] int64
    max_logits: Array  # [n] float32: the largest logit; if it is not finite, every token is banned
    logprobs_indices: list[int] = field(default_factory=list)  # samples with log probabilities
    logprobs: LogprobsArrays | None = None
    beam_indices: list[int] = field(default_factory=list)  # samples of beams, for which no token is sampled
    beams: BeamArrays | None = None
    products: Array | None = None  # [n, vocab], of the head, if they were computed for all samples


class BeamArrays(NamedTuple):
    """Candidates for the next token of some beams."""

    tokens: Array  # [n, candidates] int64: likeliest first
    logprobs: Array  # [n, candidates] float32: minus infinity if the token is banned
    ranks: Array  # [n, candidates] int64: among all tokens, from 1
    top_tokens: Array  # [n, num_top] int64: the likeliest of all tokens
    top_logprobs: Array  # [n, num_top] float32


class LogprobsArrays(NamedTuple):
    """Log probabilities of one token a row, and of the row's likeliest tokens."""

    logprobs: Array  # [n] float32
    ranks: Array  # [n] int64: among all tokens, from 1
    top_tokens: Array  # [n, num_top] int64, likeliest first
    top_logprobs: Array  # [n, num_top] float32


def to_token_logprobs(arrays: LogprobsArrays, tokens: Sequence[int], nums_top: Sequence[int]) -> list[TokenLogprobs]:
    """Convert arrays on the host. `nums_top` is how many of the likeliest tokens each row gets."""
    logprobs, ranks, top, top_logprobs = (array.tolist() for array in arrays)
    return [
        TokenLogprobs(
            (token, logprobs[row], ranks[row]),
            [(other, top_logprobs[row][index], index + 1) for index, other in enumerate(top[row][:num_top])],
        )
        for row, (token, num_top) in enumerate(zip(tokens, nums_top, strict=True))
    ]


def to_candidates(arrays: BeamArrays, requests: Sequence[Request]) -> list[Candidates]:
    """The same for beams."""
    tokens, logprobs, ranks, top, top_logprobs = (array.tolist() for array in arrays)
    result: list[Candidates] = []
    for row, request in enumerate(requests):
        candidates = zip(tokens[row][: num_candidates(request)], logprobs[row], ranks[row], strict=False)
        likeliest_tokens = zip(top[row][: request.params.logprobs or 0], top_logprobs[row], strict=False)
        result.append(
            Candidates(
                [each for each in candidates if math.isfinite(each[1])],
                [(token, logprob, rank) for rank, (token, logprob) in enumerate(likeliest_tokens, 1)],
            )
        )
    return result
