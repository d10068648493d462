"""GpuSampler: chooses tokens on the GPU without a word from the host, and keeps each request's last one there.

Tokens are chosen straight from the head's products. Only requests that change their logits have them in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.engine.batch import Samples
from quire.engine.gpu_batch import GpuBuffers
from quire.engine.sampler import Choice, LogprobsTensors, Sampler
from quire.kernels import Kernels
from quire.kernels.cuda.sampling.argmax import Argmax
from quire.kernels.cuda.sampling.logprobs import logprobs
from quire.kernels.cuda.sampling.sample import Draws, TokenSampler
from quire.models.decoder import Decoder


class GpuSampler(Sampler):
    def __init__(self, model: Decoder, buffers: GpuBuffers, ops: Kernels) -> None:
        super().__init__(model, buffers.state, ops)
        device, max_rows = ops.device, buffers.max_rows
        self._buffers = buffers
        self._max_rows = max_rows
        self._tokens = torch.zeros(buffers.max_tokens, dtype=torch.int64, device=device)  # of the samples
        self._largest = torch.zeros(buffers.max_tokens, dtype=torch.float32, device=device)
        self.last_tokens = torch.zeros(self.state.size + 1, dtype=torch.int64, device=device)  # by entry of the state
        self._argmax = Argmax(max_rows, device)
        vocab_size = model.head.weight.shape[0]
        self._draw = TokenSampler(max_rows, vocab_size, model.head.softcap, device)
        self._draw_changed = TokenSampler(max_rows, vocab_size, None, device)  # from logits that are capped already

    def prepare(self, hidden: Tensor) -> None:
        """Run every kernel once, for a sample that nobody wants. hidden [1 or more, hidden_size]"""
        entries, lengths = self._buffers.sample_entries.view(1), self._buffers.sample_lengths.view(1)
        draws = self._draws(entries, lengths)._replace(has_top_k=True, has_top_p=True)
        self._draw(self.model.products(hidden), draws, self._tokens, self._largest)
        self._draw_changed(self.model.logits(hidden[:1]), draws, self._tokens, self._largest)
        self._argmax(self.model.products(hidden), entries, self._tokens, self._largest, self.last_tokens)
        self.score(hidden[:1], [0], 1)
        vocab_size = self.model.head.weight.shape[0]
        logits = hidden.new_zeros(1, vocab_size, dtype=torch.float32)
        index, bits = hidden.new_zeros(1, 2, dtype=torch.int64), -(-vocab_size // 8)
        self.ops.penalize(logits, logits.int(), index, logits[:, :3].contiguous())
        self.ops.apply_token_bitmask(logits, index[0, :1], hidden.new_zeros(1, bits, dtype=torch.uint8))

    def score(self, hidden: Tensor, targets: Sequence[int], num_top: int) -> LogprobsTensors:
        return self._report(self.model.products(hidden), self._column(targets), [num_top] * len(targets))

    def _choose_plain(self, samples: Samples, hidden: Tensor) -> tuple[Choice, list[int]]:
        count, products = len(samples), None
        if 0 < count <= self._max_rows:
            products = self.model.products(hidden)[:count]
            self._choose_some(products, 0, count)
        elif count:  # drafts of many requests
            for first in range(0, count, self._max_rows):
                stop = min(first + self._max_rows, count)
                self._choose_some(self.model.products(hidden[first:stop]), first, stop)
        changed: list[int] = []
        if self.state.asked.processes_logits:
            requests = enumerate(samples.requests)
            changed = [nth for nth, request in requests if request.processes_logits and request.beam is None]
        return Choice(self._tokens[:count], self._largest[:count], products=products), changed

    def _choose_some(self, products: Tensor, first: int, stop: int) -> None:
        """Tokens of samples first:stop, from what the head computes of them."""
        entries = self._buffers.sample_entries.view(stop)[first:]
        tokens, largest = self._tokens[first:stop], self._largest[first:stop]
        if self.state.asked.draws:
            lengths = self._buffers.sample_lengths.view(stop)[first:]
            self._draw(products, self._draws(entries, lengths), tokens, largest)
        else:
            self._argmax(products, entries, tokens, largest, self.last_tokens)

    def _choose_and_report(self, samples: Samples, hidden: Tensor, left: list[int], choice: Choice) -> None:
        if left:
            self._choose_from_logits(samples, left, self._logits(hidden, choice.products, left), choice)
        if reported := choice.reported:
            index = self._column(reported)
            products = self.model.products(hidden[index]) if choice.products is None else choice.products[index]
            nums_top = [samples.requests[nth].params.logprobs or 0 for nth in reported]
            choice.report = self._report(products, choice.tokens[index], nums_top)

    def _report(self, products: Tensor, tokens: Tensor, nums_top: list[int]) -> LogprobsTensors:
        return LogprobsTensors(
            *logprobs(products, tokens, self._column(nums_top), max(nums_top), self.model.head.softcap)
        )

    def _choose_from_logits(self, samples: Samples, chosen: list[int], logits: Tensor, choice: Choice) -> None:
        self._process_logits(samples, chosen, logits)
        for first in range(0, len(chosen), self._max_rows):
            some = chosen[first : first + self._max_rows]
            index = self._column(some)
            entries = self._buffers.sample_entries.view(len(samples))[index]
            draws = self._draws(entries, self._buffers.sample_lengths.view(len(samples))[index])
            tokens, largest = torch.empty_like(index), logits.new_empty(len(some))
            self._draw_changed(logits[first : first + len(some)], draws, tokens, largest)
            choice.tokens[index], choice.largest[index] = tokens, largest

    def _draws(self, entries: Tensor, lengths: Tensor) -> Draws:
        state, asked = self.state, self.state.asked
        return Draws(entries, lengths, state.seeds, state.settings, self.last_tokens, asked.top_k, asked.top_p)
