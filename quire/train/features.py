"""Features: what the target computes for a dialogue, and padded batches of them. They are computed again in each epoch,
so that only those of one round are in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
        """All dialogues are copied together: on a GPU a copy takes as long as a launch."""
        target, inputs = self._target, self._inputs
        lengths = [len(dialogue.tokens) for dialogue in dialogues]
        states = self._states.compute([dialogue.tokens.tolist() for dialogue in dialogues])
        joined = [self._join([each.taps[nth] for each in states]) for nth in range(len(inputs.tap_layers))]
        taps = dict(zip(inputs.tap_layers, joined, strict=True))
        read = [taps[layer] for layer in inputs.taps]
        hidden = self._join([each.hidden for each in states])
        stacked = torch.stack(read, dim=1) if read else hidden.new_zeros(len(hidden), 0, target.hidden_size)
        keys, values = self._keys_values(dialogues, taps, lengths)
        columns = [torch.split(self._keep(each), lengths) for each in (stacked, hidden, *keys, *values)]
        for dialogue, its_taps, its_hidden, *its_keys in zip(dialogues, *columns, strict=True):
            count = len(keys)
            yield Features(dialogue, its_taps, its_hidden, tuple(its_keys[:count]), tuple(its_keys[count:]))

    def _keys_values(
        self, dialogues: Sequence[Dialogue], taps: Mapping[int, Tensor], lengths: Sequence[int]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """By layer."""
        target, keys, values = self._target, list[Tensor](), list[Tensor]()
        positions = torch.cat([torch.arange(length) for length in lengths])
        for layer in self._inputs.kv_layers:
            if layer:
                x = taps[layer - 1]
            else:
                x = target.embed(torch.cat([torch.from_numpy(each.tokens) for each in dialogues]).long())
            k, v = target.keys_values(layer, x, positions)
            keys.append(k)
            values.append(v)
        return keys, values

    def _join(self, parts: Sequence[Any]) -> Tensor:
        return torch.cat([self._target.as_tensor(part) for part in parts])

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

    def at_anchors(self, x: Tensor, shift: int = 0) -> Tensor:
        """x [dialogues, tokens, ...] -> [dialogues, anchors, ...]"""
        return take(x, self.anchors + shift)


def take(x: Tensor, index: Tensor) -> Tensor:
    """x [rows, n, ...], index [rows, m] -> [rows, m, ...]"""
    return x[torch.arange(len(x), device=x.device)[:, None], index]


def make_batch(target: Target, features: Sequence[Features], anchors: Sequence[Tensor]) -> Batch:
    """`anchors` are those of each dialogue, at least one, ascending."""
    device = target.device  # few transfers: each waits for what the device computes
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
