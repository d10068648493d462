"""Features: what the target computes for a dialogue, and padded batches of them. They are computed again in each epoch,
so that only those of one round are in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.train.dialogues import Dialogue
from quire.train.target import STORED, Target


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a head reads of the target. `taps` are layers after which states are read, `kv_layers` those whose keys and
    values are."""

    taps: tuple[int, ...] = ()
    kv_layers: tuple[int, ...] = ()

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """All layers after which states are needed: keys and values are computed from their layer's input."""
        return tuple(sorted({*self.taps, *(layer - 1 for layer in self.kv_layers if layer)}))


@dataclass(frozen=True, slots=True)
class Features:
    """Of one dialogue."""

    dialogue: Dialogue
    taps: Tensor  # [tokens, taps, hidden_size]
    hidden: Tensor  # [tokens, hidden_size], after the last norm
    keys: tuple[Tensor, ...]  # [tokens, kv_heads, head_dim] for each of kv_layers
    values: tuple[Tensor, ...]


class FeatureMaker:
    """Computes the features of dialogues with the target."""

    def __init__(self, target: Target, inputs: Inputs, max_tokens: int, dtype: torch.dtype = STORED) -> None:
        self._target = target
        self._inputs = inputs
        self._states = target.text_states(inputs.tap_layers, max_tokens)
        self._dtype = dtype

    @torch.no_grad()
    def make(self, dialogues: Sequence[Dialogue]) -> Iterator[Features]:
        group: list[Dialogue] = []
        for dialogue in dialogues:
            if group and not self._states.fits([len(each.tokens) for each in [*group, dialogue]]):
                yield from self._compute(group)
                group = []
            group.append(dialogue)
        if group:
            yield from self._compute(group)

    def _compute(self, dialogues: Sequence[Dialogue]) -> Iterator[Features]:
        target, inputs = self._target, self._inputs
        texts = [dialogue.tokens.tolist() for dialogue in dialogues]
        for dialogue, text, states in zip(dialogues, texts, self._states.compute(texts), strict=True):
            taps = dict(zip(inputs.tap_layers, map(target.as_tensor, states.taps), strict=True))
            empty = torch.zeros(len(text), 0, target.hidden_size, device=target.device)
            pairs = [
                target.keys_values(layer, taps[layer - 1] if layer else target.embed(torch.tensor(text)))
                for layer in inputs.kv_layers
            ]
            yield Features(
                dialogue,
                self._keep(torch.stack([taps[layer] for layer in inputs.taps], dim=1) if inputs.taps else empty),
                self._keep(target.as_tensor(states.hidden)),
                tuple(self._keep(k) for k, _ in pairs),
                tuple(self._keep(v) for _, v in pairs),
            )

    def _keep(self, x: Tensor) -> Tensor:
        return x.to(self._dtype, copy=True)


@dataclass(frozen=True, slots=True)
class Batch:
    """Some dialogues, padded to the longest, and positions of their answers.

    An anchor n is a token that is sampled and not computed yet. Draft j behind it is the token n + 1 + j.
    """

    dialogues: tuple[Dialogue, ...]
    tokens: Tensor  # [dialogues, tokens] int64
    embedded: Tensor  # [dialogues, tokens, hidden_size]
    taps: Tensor  # [dialogues, tokens, taps, hidden_size]
    hidden: Tensor  # [dialogues, tokens, hidden_size]
    keys: tuple[Tensor, ...]  # [dialogues, tokens, kv_heads, head_dim] for each of kv_layers
    values: tuple[Tensor, ...]
    lengths: Tensor  # [dialogues]
    anchors: Tensor  # [dialogues, anchors] int64; padding repeats the last one
    is_anchor: Tensor  # [dialogues, anchors] bool
    host_anchors: tuple[Tensor, ...]  # those of each dialogue, without padding, on the host

    def count(self, row: int, place: int) -> int:
        """How many of a dialogue's anchors have a draft at that place: those in front."""
        return int((self.host_anchors[row] + place + 1 < len(self.dialogues[row].tokens)).sum())

    def at_anchors(self, x: Tensor, shift: int = 0) -> Tensor:
        """x [dialogues, tokens, ...] -> [dialogues, anchors, ...]"""
        return take(x, self.anchors + shift)


def take(x: Tensor, index: Tensor) -> Tensor:
    """x [rows, n, ...], index [rows, m] -> [rows, m, ...]"""
    return x[torch.arange(len(x), device=x.device)[:, None], index]


def make_batch(target: Target, features: Sequence[Features], anchors: Sequence[Tensor]) -> Batch:
    """`anchors` are those of each dialogue, at least one, ascending."""
    device = target.device
    pad = torch.nn.utils.rnn.pad_sequence
    texts = [torch.from_numpy(each.dialogue.tokens).long() for each in features]
    tokens = pad(texts, batch_first=True).to(device)
    width = max(len(each) for each in anchors)
    filled = torch.stack([torch.cat([each, each[-1:].expand(width - len(each))]) for each in anchors])
    counts = torch.tensor([len(each) for each in anchors])

    def stack(tensors: Sequence[Tensor]) -> Tensor:
        return pad(list(tensors), batch_first=True).float()

    return Batch(
        dialogues=tuple(each.dialogue for each in features),
        tokens=tokens,
        embedded=target.embed(tokens),
        taps=stack([each.taps for each in features]),
        hidden=stack([each.hidden for each in features]),
        keys=tuple(map(stack, zip(*(each.keys for each in features), strict=True))),
        values=tuple(map(stack, zip(*(each.values for each in features), strict=True))),
        lengths=torch.tensor([len(text) for text in texts], device=device),
        anchors=filled.to(device),
        is_anchor=(torch.arange(width) < counts[:, None]).to(device),
        host_anchors=tuple(anchors),
    )


def find_anchors(dialogue: Dialogue) -> Tensor:
    """All tokens of the answer that another one follows."""
    return torch.arange(dialogue.num_prompt, len(dialogue.tokens) - 1)


def pick_anchors(dialogue: Dialogue, share: float, generator: torch.Generator) -> Tensor:
    """Some of them, at random."""
    anchors = find_anchors(dialogue)
    count = max(1, round(share * len(anchors)))
    if count == len(anchors):
        return anchors
    return anchors[torch.randperm(len(anchors), generator=generator)[:count]].sort().values
