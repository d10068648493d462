"""GpuSampler: samples tokens on the GPU and keeps each request's last token there, without a synchronization.

Tokens are sampled from the head's products directly. Only requests with logits processors have float32 logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.engine.batch import Samples
from quire.engine.gpu_batch import GpuBuffers
from quire.engine.sampler import LogprobsArrays, Sampler, SamplerOutput
from quire.kernels import Kernels
from quire.kernels.cuda.sampling.argmax import Argmax
from quire.kernels.cuda.sampling.logprobs import logprobs
from quire.kernels.cuda.sampling.sample import SamplingInputs, TokenSampler
from quire.layers.embedding import Head


class GpuSampler(Sampler):
    def __init__(self, head: Head, buffers: GpuBuffers, ops: Kernels) -> None:
        super().__init__(head, buffers.state, ops)
        device, max_rows = torch.device(ops.device), buffers.max_rows
        self._buffers = buffers
        self._max_rows = max_rows
        self.tokens = torch.zeros(buffers.max_tokens, dtype=torch.int64, device=device)  # of the samples
        self._max_logits = torch.zeros(buffers.max_tokens, dtype=torch.float32, device=device)
        self.last_tokens = torch.zeros(self.state.size + 1, dtype=torch.int64, device=device)  # by entry of the state
        self._argmax = Argmax(max_rows, device)
        vocab_size = head.weight.shape[0]
        self._sample_products = TokenSampler(max_rows, vocab_size, head.softcap, device)
        self._sample_logits = TokenSampler(max_rows, vocab_size, None, device)  # the softcap is already applied

    def prepare(self, hidden: Tensor) -> None:
        """Warm up: run every kernel once on a dummy sample. hidden [1 or more, hidden_size]"""
        self._load_matmuls(hidden)
        entries, lengths = self._buffers.sample_entries.view(1), self._buffers.sample_lengths.view(1)
        inputs = self._sampling_inputs(entries, lengths)._replace(has_top_k=True, has_top_p=True)
        self._sample_products(self.head.weight.matmul(hidden), inputs, self.tokens, self._max_logits)
        self._sample_logits(self.head(hidden[:1]), inputs, self.tokens, self._max_logits)
        self._argmax(self.head.weight.matmul(hidden), entries, self.tokens, self._max_logits, self.last_tokens)
        self.score(hidden[:1], [0], 1)
        vocab_size = self.head.weight.shape[0]
        logits = hidden.new_zeros(1, vocab_size, dtype=torch.float32)
        index, bits = hidden.new_zeros(1, 2, dtype=torch.int64), -(-vocab_size // 8)
        self.ops.penalize(logits, logits.int(), index, logits[:, :3].contiguous())
        self.ops.apply_token_bitmask(logits, index[0, :1], hidden.new_zeros(1, bits, dtype=torch.uint8))

    def _load_matmuls(self, hidden: Tensor) -> None:
        """Multiply with the head for many numbers of rows. cuBLAS has a kernel for each range of them, and CUDA loads
        it at its first use, which takes 50 ms."""
        rows = hidden.new_zeros(self._max_rows, hidden.shape[1])
        for count in (*range(1, min(64, self._max_rows)), *range(64, self._max_rows, 8), self._max_rows):
            self.head.weight.matmul(rows[:count])

    def score(self, hidden: Tensor, targets: Sequence[int], num_top: int) -> LogprobsArrays:
        products = self.head.weight.matmul(hidden)
        return self._gather_logprobs(products, self._put(targets), [num_top] * len(targets))

    def _sample_plain(self, samples: Samples, hidden: Tensor) -> tuple[SamplerOutput, list[int]]:
        count, products = len(samples), None
        if 0 < count <= self._max_rows:
            products = self.head.weight.matmul(hidden)[:count]
            self._sample_range(products, 0, count)
        elif count:  # drafts of many requests
            for first in range(0, count, self._max_rows):
                stop = min(first + self._max_rows, count)
                self._sample_range(self.head.weight.matmul(hidden[first:stop]), first, stop)
        processed: list[int] = []
        if self.state.flags.processes_logits:
            requests = enumerate(samples.requests)
            processed = [nth for nth, request in requests if request.processes_logits and request.beam is None]
        return SamplerOutput(self.tokens[:count], self._max_logits[:count], products=products), processed

    def _sample_range(self, products: Tensor, first: int, stop: int) -> None:
        """Sample tokens first:stop from the head's products."""
        entries = self._buffers.sample_entries.view(stop)[first:]
        tokens, max_logits = self.tokens[first:stop], self._max_logits[first:stop]
        if self.state.flags.random:
            lengths = self._buffers.sample_lengths.view(stop)[first:]
            self._sample_products(products, self._sampling_inputs(entries, lengths), tokens, max_logits)
        else:
            self._argmax(products, entries, tokens, max_logits, self.last_tokens)

    def _sample_rest(self, samples: Samples, hidden: Tensor, rest: list[int], output: SamplerOutput) -> None:
        if rest:
            self._sample_from_logits(samples, rest, self._logits(hidden, output.products, rest), output)
        if scored := output.logprobs_indices:
            index = self._put(scored)
            products = self.head.weight.matmul(hidden[index]) if output.products is None else output.products[index]
            nums_top = [samples.requests[nth].params.logprobs or 0 for nth in scored]
            output.logprobs = self._gather_logprobs(products, output.tokens[index], nums_top)

    def _gather_logprobs(self, products: Tensor, tokens: Tensor, nums_top: list[int]) -> LogprobsArrays:
        return LogprobsArrays(*logprobs(products, tokens, self._put(nums_top), max(nums_top), self.head.softcap))

    def _sample_from_logits(self, samples: Samples, indices: list[int], logits: Tensor, output: SamplerOutput) -> None:
        self.process(samples, indices, logits)
        for first in range(0, len(indices), self._max_rows):
            count = min(self._max_rows, len(indices) - first)
            index = self._put(indices[first : first + count])
            entries = self._buffers.sample_entries.view(len(samples))[index]
            inputs = self._sampling_inputs(entries, self._buffers.sample_lengths.view(len(samples))[index])
            tokens, max_logits = torch.empty_like(index), logits.new_empty(count)
            self._sample_logits(logits[first : first + count], inputs, tokens, max_logits)
            output.tokens[index], output.max_logits[index] = tokens, max_logits

    def _sampling_inputs(self, entries: Tensor, lengths: Tensor) -> SamplingInputs:
        state, flags = self.state, self.state.flags
        return SamplingInputs(entries, lengths, state.seeds, state.settings, self.last_tokens, flags.top_k, flags.top_p)
