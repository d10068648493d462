"""DraftVocabulary: the ids that a head is trained to draft, and the loss over them and over a dialogue's own tokens.

The engine drafts from these ids and from the tokens that a request has so far (`engine/draft_vocabulary.py`), so the
head is trained with both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.engine.draft_vocabulary import MAX_OWN
from quire.train.dialogues import Dialogue
from quire.train.features import Batch, take
from quire.train.target import Target


def choose_draft_ids(dialogues: Sequence[Dialogue], num_ids: int, vocab_size: int) -> Tensor:
    """The ids that answers have most, then the lowest ones: tokenizers give common tokens low ids. Ascending."""
    counts = np.zeros(vocab_size, np.int64)
    for dialogue in dialogues:
        np.add.at(counts, dialogue.tokens[dialogue.num_prompt :], 1)
    most = np.argsort(-counts, kind="stable")[:num_ids]
    return torch.from_numpy(np.sort(most))


NOWHERE = 1 << 40  # behind every position of a dialogue


class Bigrams(NamedTuple):
    """Added to logits: the products of the two rows of the draft before and of the draft."""

    before: Tensor  # [ids, rank]
    after: Tensor  # [ids, rank]


class Columns(NamedTuple):
    """The ids of a dialogue's logits: the draft vocabulary, then its own tokens."""

    ids: Tensor  # [columns]
    rows: Tensor  # [columns, hidden_size], of the target's head
    first: Tensor  # [columns]: the position of each own token, 0 in the draft vocabulary


class DraftVocabulary:
    def __init__(self, target: Target, ids: Tensor) -> None:
        self.ids = ids.to(target.device)
        self.softcap = target.softcap
        self._target = target
        self.rows = target.head_rows(self.ids)
        self._index = torch.full((target.config.vocab_size,), -1, dtype=torch.int64, device=target.device)
        self._index[self.ids] = torch.arange(len(ids), device=target.device)
        self._drafted = (self._index >= 0).cpu().numpy()

    def __len__(self) -> int:
        return len(self.ids)

    def find_own(self, dialogue: Dialogue) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """A dialogue's tokens that are not in the draft vocabulary, and where each occurs first, in that order."""
        tokens, first = np.unique(dialogue.tokens, return_index=True)
        kept = ~self._drafted[tokens]
        order = np.argsort(first[kept])[:MAX_OWN]
        return tokens[kept][order].astype(np.int64), first[kept][order].astype(np.int64)

    def columns(self, dialogue: Dialogue) -> Columns:
        own, first = (torch.from_numpy(each).to(self.ids.device) for each in self.find_own(dialogue))
        if not len(own):
            return Columns(self.ids, self.rows, torch.zeros_like(self.ids))
        return Columns(
            torch.cat([self.ids, own]),
            torch.cat([self.rows, self._target.head_rows(own)]),
            torch.cat([torch.zeros_like(self.ids), first]),
        )

    def own_tokens(self, dialogues: Sequence[Dialogue]) -> OwnTokens:
        """Those of a batch, with one transfer for all: each waits for what the device computes."""
        found = [self.find_own(dialogue) for dialogue in dialogues]
        most = max(len(own) for own, _ in found)
        padded = np.zeros((2, len(found), most), np.int64)
        padded[1] = NOWHERE
        for nth, each in enumerate(found):
            padded[:, nth, : len(each[0])] = each
        tokens, first = torch.from_numpy(padded).to(self.ids.device)
        rows = self._target.head_rows(tokens.flatten()).view(len(found), most, self._target.hidden_size)
        return OwnTokens(rows, first[:, None])

    def before(self, tokens: Tensor, bigrams: Bigrams) -> Tensor:
        """The rows of `bigrams.before` of tokens [...]; zero for those outside the draft vocabulary. [..., rank]"""
        index = self._index[tokens]
        rows = bigrams.before[index.clamp(min=0)]
        return torch.where((index >= 0)[..., None], rows, 0.0)

    def logits(self, states: Tensor, columns: Columns, anchors: Tensor, added: Tensor | None = None) -> Tensor:
        """states [anchors, hidden_size], added [anchors, ids] -> [anchors, columns]. A token that comes later than the
        anchor is minus infinity."""
        logits = self.cap((states.to(columns.rows.dtype) @ columns.rows.T).float())
        if added is not None:
            logits[:, : len(self)] += added
        return logits.masked_fill_(columns.first > anchors[:, None], -torch.inf)

    def cap(self, products: Tensor) -> Tensor:
        """Logits of products with the output matrix."""
        return products if self.softcap is None else self.softcap * torch.tanh(products / self.softcap)

    def products(self, x: Tensor, own: OwnTokens) -> Tensor:
        """x [dialogues, anchors, hidden_size] -> [dialogues, anchors, ids + own tokens]"""
        x = x.to(self.rows.dtype)
        return torch.cat([x @ self.rows.T, x @ own.rows.mT], dim=-1)

    def gradient(self, error: Tensor, own: OwnTokens) -> Tensor:
        """That of `products`: [dialogues, anchors, ids + own tokens] -> [dialogues, anchors, hidden_size]"""
        error, num_ids = error.to(self.rows.dtype), len(self)
        return error[..., :num_ids] @ self.rows + error[..., num_ids:] @ own.rows


class OwnTokens(NamedTuple):
    """The own tokens of a batch's dialogues, padded to the most that one has."""

    rows: Tensor  # [dialogues, tokens, hidden_size], of the target's head
    first: Tensor  # [dialogues, 1, tokens]: where each occurs first; padding occurs nowhere


class SoftCrossEntropy(torch.autograd.Function):
    """The cross entropy of a head's distribution against the target's. The output matrix is not trained, so the
    gradient of the states is computed at once, place by place, and logits are never kept.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, before: Tensor, after: Tensor, batch: Batch, vocabulary: DraftVocabulary, decay: float
    ) -> Tensor:
        """states [dialogues, anchors, places, hidden_size]; before [dialogues, anchors, places, rank] and after
        [ids, rank] of the bigrams, whose rank may be 0. Returns the mean, with weights decay ** place."""
        own = vocabulary.own_tokens(batch.dialogues)
        if states.is_cuda and vocabulary.softcap is None:
            loss, *gradients = find_gradients(states, before, after, batch, vocabulary, own, decay)
            ctx.save_for_backward(*gradients)
            return loss
        num_ids = len(vocabulary)
        is_unknown = own.first > batch.anchors[..., None]  # own tokens that come later than the anchor
        grad_states, grad_before = torch.zeros_like(states), torch.zeros_like(before)
        grad_after = torch.zeros_like(after)
        total, weight_sum = states.new_zeros(()), states.new_zeros(())
        for place in range(states.shape[2]):
            x, b = states[:, :, place], before[:, :, place]
            exists = batch.is_anchor & (batch.anchors + place + 1 < batch.lengths[:, None])
            weight = exists * decay**place
            known = take(batch.hidden, (batch.anchors + place).clamp(max=batch.hidden.shape[1] - 1))
            wanted = vocabulary.cap(vocabulary.products(known, own)).float()
            wanted[..., num_ids:].masked_fill_(is_unknown, -torch.inf)
            wanted = wanted.softmax(-1)
            products = vocabulary.products(x, own).float()
            logits = vocabulary.cap(products)
            if after.shape[1]:
                logits[..., :num_ids] += b @ after.T
            logits[..., num_ids:].masked_fill_(is_unknown, -torch.inf)
            logprobs = logits.log_softmax(-1)
            total -= (weight * (wanted * logprobs.masked_fill(wanted == 0, 0.0)).sum(-1)).sum()
            weight_sum += weight.sum()
            error = logprobs.exp_().sub_(wanted).mul_(weight[..., None])
            if after.shape[1]:
                added = error[..., :num_ids]
                grad_before[:, :, place] = added @ after
                grad_after += added.flatten(0, 1).T @ b.flatten(0, 1)
            if vocabulary.softcap is not None:
                error *= 1 - torch.tanh(products / vocabulary.softcap).square_()
            grad_states[:, :, place] = vocabulary.gradient(error, own).to(states.dtype)
        scale = 1 / weight_sum.clamp(min=1e-9)
        ctx.save_for_backward(grad_states * scale, grad_before * scale, grad_after * scale)
        return total * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        return (*(each * grad for each in ctx.saved_tensors), None, None, None)


def find_gradients(
    states: Tensor,
    before: Tensor,
    after: Tensor,
    batch: Batch,
    vocabulary: DraftVocabulary,
    own: OwnTokens,
    decay: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, and the gradients of states, before and after, on a GPU: the same with a kernel for what lies between
    the products. The bigrams are further columns of the matrices."""
    from quire.kernels.cuda.soft_cross_entropy import soft_cross_entropy  # loads Triton

    rows, size = vocabulary.rows, states.shape[3]
    joined = torch.cat([rows, after.to(rows.dtype)], dim=1)
    inputs = torch.cat([states, before], dim=3).to(rows.dtype)
    gradients, grad_after = torch.zeros_like(inputs, dtype=torch.float32), torch.zeros_like(after)
    total, weight_sum = states.new_zeros(()), states.new_zeros(())
    first = own.first[:, 0].contiguous()
    for place in range(states.shape[2]):
        x = inputs[:, :, place].contiguous()
        exists = batch.is_anchor & (batch.anchors + place + 1 < batch.lengths[:, None])
        weights = (exists * decay**place).float()
        known = take(batch.hidden, (batch.anchors + place).clamp(max=batch.hidden.shape[1] - 1)).to(rows.dtype)
        error, own_error = x @ joined.T, x[..., :size] @ own.rows.mT  # logits, until the kernel has replaced them
        losses = soft_cross_entropy(
            known @ rows.T, known @ own.rows.mT, error, own_error, first, batch.anchors, weights
        )
        total += losses.sum()
        weight_sum += weights.sum()
        gradients[:, :, place] = error @ joined
        gradients[:, :, place, :size] += own_error @ own.rows
        grad_after += error.flatten(0, 1).T @ x[..., size:].flatten(0, 1)
    scale = 1 / weight_sum.clamp(min=1e-9)
    gradients *= scale
    return total * scale, gradients[..., :size], gradients[..., size:], grad_after * scale
