"""The engine's sampler without a model: rows of logits stand in for hidden entries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.core.drafts import ROOT
from quire.core.plan import Plan, TokenLogprobs
from quire.core.request import Request
from quire.engine.batch import Samples
from quire.engine.buffers import DirectUploader
from quire.engine.sampler import Sampler, to_token_logprobs
from quire.engine.sampling_state import SamplingState
from quire.kernels import Kernels


class NoHead:
    """Its hidden states are the logits."""

    @property
    def weight(self) -> NoHead:
        return self

    def __call__(self, hidden: Tensor) -> Tensor:
        return hidden.float().clone()

    def argmax(self, hidden: Tensor, rows: Sequence[int]) -> tuple[list[int], list[float]]:
        largest, tokens = hidden[list(rows)].max(-1)
        return tokens.tolist(), largest.tolist()


def make_sampler(vocab_size: int, max_rows: int, ops: Kernels) -> Sampler:
    head: Any = NoHead()
    return Sampler(head, SamplingState(max_rows, vocab_size, ops.arrays, DirectUploader(ops.arrays)), ops)


def samples_of(sampler: Sampler, requests: Sequence[Request]) -> Samples:
    """The next token of each request; one that has drafts has a sample behind each of them."""
    entries = sampler.state.assign(Plan(0, list(requests)))
    samples = Samples()
    for row, request in enumerate(requests):
        depths = [0, *request.drafts.depths()] if request.drafts else [0]
        for nth, depth in enumerate(depths):
            samples.requests.append(request)
            samples.rows.append(row)
            samples.indices.append(len(samples.indices))
            samples.lengths.append(len(request.tokens) + depth)
            samples.nodes.append(ROOT + nth)
            samples.entries.append(entries[row])
        if request.drafts:
            samples.drafts[row] = request.drafts
    return samples


def sample(
    logits: Tensor, requests: Sequence[Request], ops: Kernels
) -> tuple[list[int | None], list[TokenLogprobs | None]]:
    """logits [samples, vocab] -> a token each, None where none is left, and log probabilities if asked for."""
    sampler = make_sampler(logits.shape[1], len(requests), ops)
    samples = samples_of(sampler, requests)
    output = sampler.sample(samples, logits)
    tokens = output.tokens.tolist()
    told: list[TokenLogprobs | None] = [None] * len(samples)
    if output.logprobs is not None:
        nums_top = [samples.requests[nth].params.logprobs or 0 for nth in output.logprobs_indices]
        for nth, each in zip(
            output.logprobs_indices,
            to_token_logprobs(output.logprobs, [tokens[nth] for nth in output.logprobs_indices], nums_top),
            strict=True,
        ):
            told[nth] = each
    kept = map(math.isfinite, output.max_logits.tolist())
    return [token if is_kept else None for token, is_kept in zip(tokens, kept, strict=True)], told


def changed(logits: Tensor, requests: Sequence[Request], ops: Kernels) -> Tensor:
    """What the requests make of their logits."""
    sampler = make_sampler(logits.shape[1], len(requests), ops)
    samples, result = samples_of(sampler, requests), torch.empty_like(logits).copy_(logits)
    sampler.process(samples, list(range(len(samples))), result)
    return result
