"""Blocks in host memory: where those of preempted requests lie, and the way there and back. `cache.py` calls this.

On a GPU blocks are gathered into one buffer there, and that is copied in as few pieces as the host blocks allow,
to pinned memory and so without the host waiting; on the stream that computes, so that no step overtakes a copy. Memory
is taken piece by piece as host_blocks are first used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

PIECE_BYTES = 1 << 26  # of host memory taken at a time, and of the buffer on the device
Pairs = Sequence[tuple[int, int]]


class HostBlocks:
    """Memory for whole blocks. Keys and values of all layers of a block lie side by side in its host block."""

    def __init__(self, parts: Sequence[Tensor], num_host_blocks: int) -> None:
        """`parts` hold the cache: [layers, blocks, ...] each."""
        self._parts = as_words(parts)
        self._device, self._dtype = self._parts[0].device, self._parts[0].dtype
        self._width = sum(part.shape[0] * part.shape[2] for part in self._parts)  # words of a block
        self.num_host_blocks = num_host_blocks
        self.piece_slots = max(1, min(num_host_blocks, PIECE_BYTES // (self._width * self._dtype.itemsize)))
        self._pieces: list[Tensor] = []
        self._staging: Tensor | None = None

    @torch.inference_mode()
    def save(self, pairs: Pairs) -> None:
        """Copy each (block, host_block). No host_block may be named twice."""
        for chunk in self._cut([(host_block, block) for block, host_block in pairs]):
            staging, blocks = self._stage(chunk)
            for part, staged in self._staged(staging):
                torch.index_select(part, 1, blocks, out=staged)
            for first, last in self._runs(chunk):
                self._host_blocks(chunk[first][0], last - first).copy_(staging[first:last], non_blocking=True)

    @torch.inference_mode()
    def load(self, pairs: Pairs) -> None:
        """Copy each (host_block, block). No block may be named twice, unless all its host_blocks hold the same."""
        for chunk in self._cut(pairs):
            staging, blocks = self._stage(chunk)
            for first, last in self._runs(chunk):
                staging[first:last].copy_(self._host_blocks(chunk[first][0], last - first), non_blocking=True)
            for part, staged in self._staged(staging):
                part.index_copy_(1, blocks, staged)

    def _cut(self, pairs: Pairs) -> Iterator[Pairs]:
        """Pairs of (host block, block) sorted by host block, in portions that are staged at once."""
        ordered = sorted(pairs)
        for first in range(0, len(ordered), self.piece_slots):
            yield ordered[first : first + self.piece_slots]

    def _runs(self, chunk: Pairs) -> Iterator[tuple[int, int]]:
        """Places in a chunk between which its host_blocks lie side by side in one piece."""
        breaks = [
            place
            for place, ((before, _), (after, _)) in enumerate(pairwise(chunk), 1)
            if after != before + 1 or after % self.piece_slots == 0
        ]
        return pairwise([0, *breaks, len(chunk)])

    def _stage(self, chunk: Pairs) -> tuple[Tensor, Tensor]:
        """Room on the device for a chunk's blocks, and their numbers."""
        if self._staging is None:
            self._staging = torch.empty(self.piece_slots, self._width, dtype=self._dtype, device=self._device)
        blocks = torch.tensor([block for _, block in chunk], pin_memory=self._is_pinned)
        return self._staging[: len(chunk)], blocks.to(self._device, non_blocking=True)

    def _staged(self, staging: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each part with the columns of the staged blocks that are its own, [layers, blocks, words]."""
        begin = 0
        for part in self._parts:
            end = begin + part.shape[0] * part.shape[2]
            yield part, staging[:, begin:end].view(-1, part.shape[0], part.shape[2]).transpose(0, 1)
            begin = end

    def _host_blocks(self, first: int, count: int) -> Tensor:
        """Slots that lie in one piece, [count, width]; pieces up to theirs are made if they are not there yet."""
        index, place = divmod(first, self.piece_slots)
        while len(self._pieces) <= index:
            size = min(self.piece_slots, self.num_host_blocks - len(self._pieces) * self.piece_slots)
            self._pieces.append(torch.empty(size, self._width, dtype=self._dtype, pin_memory=self._is_pinned))
        return self._pieces[index][place : place + count]

    @property
    def _is_pinned(self) -> bool:
        return self._device.type == "cuda"


def as_words(parts: Sequence[Tensor]) -> list[Tensor]:
    """[layers, blocks, ...] as [layers, blocks, words]: the same bytes, in the largest units that fit all parts."""
    flat = [part.flatten(2) for part in parts]
    word = math.gcd(8, *(part.shape[2] * part.element_size() for part in flat))
    return [part.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[word]) for part in flat]
