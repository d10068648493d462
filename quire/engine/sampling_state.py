"""SamplingState: seeds, sampling settings and logits processors of running requests, on the model's device.

A running request has an entry, which is an index into the arrays of seeds and settings. These keep their addresses, so
captured graphs can read them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from quire.core.params import SamplingParams
from quire.core.plan import Plan
from quire.core.request import Request
from quire.engine.buffers import Buffer, Uploader
from quire.engine.logits_processors import LogitsProcessor, TokenCounts
from quire.kernels import Kernels
from quire.kernels.arrays import Array, Arrays

MIN_TEMPERATURE = 1e-6  # below it sampling is greedy, and float32 would overflow
MAX_PLANS = 2  # in flight; their requests keep their entries


class SamplingFlags(NamedTuple):
    """Which features of sampling at least one request of a plan uses."""

    random: bool = False  # samples from unprocessed logits, not greedily
    top_k: bool = False
    top_p: bool = False
    processes_logits: bool = False
    logprobs: bool = False
    needs_tokens: bool = False  # all tokens must be on the host before the next one is sampled


class SamplingState:
    """Entries of the requests in the last two plans. A request that is in neither loses its entry, and gets a new one
    when it is planned again."""

    def __init__(self, max_rows: int, vocab_size: int, arrays: Arrays, uploader: Uploader) -> None:
        self.size = MAX_PLANS * max_rows
        self.padding_entry = self.size  # the entry of padding rows
        self._arrays = arrays
        self._seeds = Buffer((self.size + 1,), "int64", arrays, uploader)
        self._settings = Buffer((self.size + 1, len(settings_of(SamplingParams()))), "float64", arrays, uploader)
        self.counts = TokenCounts(vocab_size, arrays)
        self.processors: dict[Request, LogitsProcessor] = {}
        self._indices: dict[Request, int] = {}
        self._free = list(reversed(range(self.size)))
        self.flags = SamplingFlags()  # of the last plan
        self._requests: list[Request] = []  # of the last plan
        self._entries: list[int] = []  # of its rows

    @property
    def seeds(self) -> Array:
        """[entries] int64"""
        return self._seeds.view(self.size + 1)

    @property
    def settings(self) -> Array:
        """[entries, NUM_SETTINGS] float64"""
        return self._settings.view(self.size + 1)

    def assign(self, plan: Plan) -> list[int]:
        """The entry of each row. Seeds and settings of new requests are added to the uploader."""
        if plan.requests != self._requests:
            self._release_others(plan)
            new = [self._take(request) for request in plan.requests if request not in self._indices]
            if new:
                self._seeds.upload_rows(min(new), max(new) + 1)
                self._settings.upload_rows(min(new), max(new) + 1)
            self._requests = list(plan.requests)
            self._entries = [self._indices[request] for request in plan.requests]
            self.flags = find_flags(plan.requests)
        return self._entries

    def processor_of(self, request: Request, ops: Kernels) -> LogitsProcessor:
        """The request's processor, with all tokens counted that are on the host."""
        processor = self.processors.get(request)
        if processor is None:
            processor = self.processors[request] = LogitsProcessor(request, self.counts, self._arrays)
        processor.count_known(request, ops)
        return processor

    def clear(self) -> None:
        """Forget all requests. After plans were dropped, token counts on the device may be wrong."""
        self._release(list(self._indices))
        self._requests, self._entries = [], []

    def _take(self, request: Request) -> int:
        index = self._indices[request] = self._free.pop()
        self._seeds.host[index] = signed(request.seed)
        self._settings.host[index] = settings_of(request.params)
        return index

    def _release_others(self, plan: Plan) -> None:
        kept = {*self._requests, *plan.requests}
        self._release([request for request in self._indices if request not in kept])

    def _release(self, requests: list[Request]) -> None:
        for request in requests:
            self._free.append(self._indices.pop(request))
            if (processor := self.processors.pop(request, None)) is not None:
                processor.release()


def find_flags(requests: Sequence[Request]) -> SamplingFlags:
    params = [request.params for request in requests]
    return SamplingFlags(
        random=any(not request.params.greedy and not request.processes_logits for request in requests),
        top_k=any(each.top_k for each in params),
        top_p=any(each.top_p < 1.0 for each in params),
        processes_logits=any(request.processes_logits for request in requests),
        logprobs=any(each.logprobs is not None for each in params),
        needs_tokens=any(request.needs_tokens for request in requests),
    )


def settings_of(params: SamplingParams) -> tuple[float, float, float, float]:
    """A row of the op's settings: temperature, top-k, top-p, and min-p as a distance below the largest logit."""
    temperature = 0.0 if params.greedy else max(params.temperature, MIN_TEMPERATURE)
    floor = temperature * math.log(params.min_p) if params.min_p > 0.0 else -math.inf
    return temperature, params.top_k, params.top_p, floor


def signed(seed: int) -> int:
    """A 64-bit seed as the int64 of the same bits."""
    seed &= 2**64 - 1
    return seed - 2**64 if seed >= 2**63 else seed
