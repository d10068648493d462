"""What a trained head is worth on dialogues that it has not seen: how often its drafts are right, by depth, and the
calibration of an exit. Held-out answers are greedy, so a draft is right if it is the answer's token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.train.dialogues import Dialogue
from quire.train.features import Batch, FeatureMaker, find_anchors, make_batch
from quire.train.heads.head import TrainedHead
from quire.train.loop import find_bigrams
from quire.train.target import Target
from quire.train.vocabulary import DraftVocabulary

NUM_BINS = 16  # of a calibration


@dataclass(frozen=True, slots=True)
class Acceptance:
    """By place: the share of drafts that are right if those before them are, and of chains that get so far."""

    num_anchors: int
    by_depth: list[float]
    reached: list[float]

    def tokens_per_step(self, depth: int) -> float:
        """Of a chain of that many drafts."""
        return 1 + sum(self.reached[:depth])


class Evaluator:
    def __init__(self, head: TrainedHead, target: Target, vocabulary: DraftVocabulary, features: FeatureMaker) -> None:
        self._head = head
        self._target = target
        self._vocabulary = vocabulary
        self._features = features

    @torch.no_grad()
    def measure(self, dialogues: Sequence[Dialogue], batch_size: int) -> Acceptance:
        depth = self._head.depth
        tried, right = np.zeros(depth, np.int64), np.zeros(depth, np.int64)
        chains, num_anchors = np.zeros(depth, np.int64), 0
        for batch in self._batches(dialogues, batch_size):
            for row, _, chosen in self._choose(batch):
                anchors = batch.anchors[row][batch.is_anchor[row]]
                index = anchors[:, None] + 1 + torch.arange(depth, device=anchors.device)
                there = index < batch.lengths[row]
                is_right = (chosen == batch.tokens[row][index.clamp(max=batch.tokens.shape[1] - 1)]) & there
                tried += there.sum(0).cpu().numpy()
                right += is_right.sum(0).cpu().numpy()
                chains += is_right.cummin(1).values.sum(0).cpu().numpy()
                num_anchors += len(anchors)
        by_depth = (right / np.maximum(tried, 1)).tolist()
        return Acceptance(num_anchors, by_depth, (chains / max(1, num_anchors)).tolist())

    @torch.no_grad()
    def calibrate(self, dialogues: Sequence[Dialogue], batch_size: int) -> list[list[float]]:
        """Of an exit: [probability, agreement], both ascending. Agreement is with the whole target, over its whole
        vocabulary."""
        probabilities, agreements = list[NDArray[np.float64]](), list[NDArray[np.bool_]]()
        for batch in self._batches(dialogues, batch_size):
            for row, logits, chosen in self._choose(batch):
                anchors = batch.anchors[row][batch.is_anchor[row]]
                wanted = self._target.top_tokens(batch.hidden[row][anchors])
                probabilities.append(logits.softmax(-1).amax(-1).double().cpu().numpy())
                agreements.append((chosen[:, 0] == wanted).cpu().numpy())
        return calibrate(np.concatenate(probabilities), np.concatenate(agreements))

    def _batches(self, dialogues: Sequence[Dialogue], batch_size: int) -> Iterator[Batch]:
        for first in range(0, len(dialogues), batch_size):
            group = list(self._features.make(dialogues[first : first + batch_size]))
            yield make_batch(self._target, group, [find_anchors(each.dialogue) for each in group])

    def _choose(self, batch: Batch) -> Iterator[tuple[int, Tensor, Tensor]]:
        """For each dialogue: its row, the logits of the last place, and the chosen tokens [anchors, depth]"""
        with self._target.autocast():
            states = self._head(batch).float()
        before, after = find_bigrams(self._head, states, batch, self._vocabulary)
        for row, dialogue in enumerate(batch.dialogues):
            anchors, columns = batch.anchors[row][batch.is_anchor[row]], self._vocabulary.columns(dialogue)
            chosen = []
            for place in range(self._head.depth):
                added = before[row, : len(anchors), place] @ after.T if after.shape[1] else None
                logits = self._vocabulary.logits(states[row, : len(anchors), place], columns, anchors, added)
                chosen.append(columns.ids[logits.argmax(-1)])
            yield row, logits, torch.stack(chosen, dim=1)


def calibrate(probabilities: NDArray[np.float64], agreements: NDArray[np.bool_]) -> list[list[float]]:
    """Means of bins of equal size. Neighbours whose agreement falls are pooled, so it never does."""
    order = np.argsort(probabilities, kind="stable")
    bins = [each for each in np.array_split(order, NUM_BINS) if len(each)]
    pools: list[tuple[float, float, int]] = []  # probability, agreement, count
    for each in bins:
        pools.append((float(probabilities[each].mean()), float(agreements[each].mean()), len(each)))
        while len(pools) > 1 and pools[-2][1] >= pools[-1][1]:
            (p, a, n), (q, b, m) = pools[-2:]
            pools[-2:] = [((p * n + q * m) / (n + m), (a * n + b * m) / (n + m), n + m)]
    return [[round(probability, 6), round(agreement, 6)] for probability, agreement, _ in pools]
