"""GpuSampler: chooses tokens on the GPU without a word from the host, and keeps each request's last one there.

Tokens are chosen straight from the head's products. Only requests that change their logits have them in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.engine.batch import Samples
from quire.engine.gpu_batch import GpuBuffers
from quire.engine.sampler import Choice, Sampler
from quire.kernels import Kernels
from quire.kernels.cuda.sampling.argmax import Argmax
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

    def argmax(self, hidden: Tensor) -> None:
        """The likeliest token of each sample; captured with the layers. hidden [samples, hidden_size]"""
        entries = self._buffers.sample_entries.view(len(hidden))
        self._argmax(self.model.products(hidden), entries, self._tokens, self._largest, self.last_tokens)

    def prepare(self, hidden: Tensor) -> None:
        """Run every kernel once, for a sample that nobody wants. hidden [1 or more, hidden_size]"""
        entries, lengths = self._buffers.sample_entries.view(1), self._buffers.sample_lengths.view(1)
        draws = self._draws(entries, lengths)._replace(has_top_k=True, has_top_p=True)
        self._draw(self.model.products(hidden), draws, self._tokens, self._largest)
        self._draw_changed(self.model.logits(hidden[:1]), draws, self._tokens, self._largest)

    def _choose_plain(self, samples: Samples, hidden: Tensor, has_argmax: bool) -> tuple[Choice, list[int]]:
        for first in range(0, len(samples), self._max_rows):
            stop = min(first + self._max_rows, len(samples))
            self._choose_some(
                samples, hidden if len(samples) <= self._max_rows else hidden[first:stop], first, stop, has_argmax
            )
        changed: list[int] = []
        if self.state.asked.changes:
            requests = enumerate(samples.requests)
            changed = [nth for nth, request in requests if request.changes_logits and request.beam is None]
        return Choice(self._tokens[: len(samples)], self._largest[: len(samples)]), changed

    def _choose_some(self, samples: Samples, hidden: Tensor, first: int, stop: int, has_argmax: bool) -> None:
        """Samples first:stop, from their hidden states, which may be followed by others."""
        is_drawn = self.state.asked.draws
        if has_argmax and not is_drawn:
            return
        entries = self._buffers.sample_entries.view(stop)[first:]
        lengths = self._buffers.sample_lengths.view(stop)[first:]
        products = self.model.products(hidden)[: stop - first]
        tokens, largest = self._tokens[first:stop], self._largest[first:stop]
        if not is_drawn:
            self._argmax(products, entries, tokens, largest, self.last_tokens)
            return
        self._draw(products, self._draws(entries, lengths), tokens, largest)

    def _choose_from_logits(self, samples: Samples, chosen: list[int], logits: Tensor, choice: Choice) -> None:
        self._change(samples, chosen, logits)
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
