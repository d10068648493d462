"""HostBlocks: blocks of preempted requests in host memory, and the copies to and from it. `cache.py` calls this.

Blocks are gathered into a staging buffer on the device, and each run of contiguous host blocks is one copy. Host memory
of a GPU is pinned, so copies are asynchronous. They are on the compute stream, in order with the steps. Host memory is
allocated in pieces, when their host blocks are first used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

PIECE_BYTES = 1 << 26  # of one allocation of host memory, and of the staging buffer
Pairs = Sequence[tuple[int, int]]


class HostBlocks:
    """Memory for whole blocks. The keys and values of all layers of a block are contiguous in its host block."""

    def __init__(self, stacks: Sequence[Tensor], num_host_blocks: int) -> None:
        """`stacks` are the cache's tensors, [planes, blocks, ...] each."""
        self._stacks = as_words(stacks)
        self._device, self._dtype = self._stacks[0].device, self._stacks[0].dtype
        self._width = sum(stack.shape[0] * stack.shape[2] for stack in self._stacks)  # words of a block
        self.num_host_blocks = num_host_blocks
        self.blocks_per_piece = max(1, min(num_host_blocks, PIECE_BYTES // (self._width * self._dtype.itemsize)))
        self._pieces: list[Tensor] = []
        self._staging: Tensor | None = None

    @torch.inference_mode()
    def save(self, pairs: Pairs) -> None:
        """Copy each (block, host block). Host blocks are distinct."""
        for chunk in self._cut([(host_block, block) for block, host_block in pairs]):
            staging, blocks = self._stage(chunk)
            for stack, staged in self._staged(staging):
                torch.index_select(stack, 1, blocks, out=staged)
            for first, last in self._runs(chunk):
                self._host_blocks(chunk[first][0], last - first).copy_(staging[first:last], non_blocking=True)

    @torch.inference_mode()
    def load(self, pairs: Pairs) -> None:
        """Copy each (host block, block). A block may occur twice only if its host blocks hold the same data."""
        for chunk in self._cut(pairs):
            staging, blocks = self._stage(chunk)
            for first, last in self._runs(chunk):
                staging[first:last].copy_(self._host_blocks(chunk[first][0], last - first), non_blocking=True)
            for stack, staged in self._staged(staging):
                stack.index_copy_(1, blocks, staged)

    def _cut(self, pairs: Pairs) -> Iterator[Pairs]:
        """Pairs of (host block, block), sorted by host block, in chunks that fit the staging buffer."""
        ordered = sorted(pairs)
        for first in range(0, len(ordered), self.blocks_per_piece):
            yield ordered[first : first + self.blocks_per_piece]

    def _runs(self, chunk: Pairs) -> Iterator[tuple[int, int]]:
        """Ranges of a chunk whose host blocks are contiguous in one piece."""
        breaks = [
            index
            for index, ((before, _), (after, _)) in enumerate(pairwise(chunk), 1)
            if after != before + 1 or after % self.blocks_per_piece == 0
        ]
        return pairwise([0, *breaks, len(chunk)])

    def _stage(self, chunk: Pairs) -> tuple[Tensor, Tensor]:
        """The staging buffer for a chunk's blocks, and their numbers on the device."""
        if self._staging is None:
            self._staging = torch.empty(self.blocks_per_piece, self._width, dtype=self._dtype, device=self._device)
        blocks = torch.tensor([block for _, block in chunk], pin_memory=self._is_pinned)
        return self._staging[: len(chunk)], blocks.to(self._device, non_blocking=True)

    def _staged(self, staging: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each stack with its columns of the staging buffer, [planes, blocks, words]."""
        begin = 0
        for stack in self._stacks:
            end = begin + stack.shape[0] * stack.shape[2]
            yield stack, staging[:, begin:end].view(-1, stack.shape[0], stack.shape[2]).transpose(0, 1)
            begin = end

    def _host_blocks(self, first: int, count: int) -> Tensor:
        """Host blocks of one piece, [count, width]. Allocates the pieces up to theirs."""
        index, offset = divmod(first, self.blocks_per_piece)
        while len(self._pieces) <= index:
            size = min(self.blocks_per_piece, self.num_host_blocks - len(self._pieces) * self.blocks_per_piece)
            self._pieces.append(torch.empty(size, self._width, dtype=self._dtype, pin_memory=self._is_pinned))
        return self._pieces[index][offset : offset + count]

    @property
    def _is_pinned(self) -> bool:
        return self._device.type == "cuda"


def as_words(stacks: Sequence[Tensor]) -> list[Tensor]:
    """View [planes, blocks, ...] as [planes, blocks, words], in the largest word that fits all stacks."""
    flat = [stack.flatten(2) for stack in stacks]
    word = math.gcd(8, *(stack.shape[2] * stack.element_size() for stack in flat))
    return [stack.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[word]) for stack in flat]
