"""HostBlocks: blocks of preempted requests in host memory, and the copies to and from it. `cache.py` calls this.

Blocks are gathered into a staging buffer on the device, and each run of contiguous host blocks is one copy. Host memory
of a GPU is pinned, so copies are asynchronous. They are on the compute stream, in order with the steps. Host memory is
allocated in pieces, when their host blocks are first used.

Blocks also travel between engines, as bytes (`kv_transfer.py`). These copies are synchronous.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from quire.kernels.arrays import Array, Arrays

PIECE_BYTES = 1 << 26  # of one allocation of host memory, and of the staging buffer
Pairs = Sequence[tuple[int, int]]


class HostBlocks:
    """Memory for whole blocks. The keys and values of all layers of a block are contiguous in its host block."""

    def __init__(self, stacks: Sequence[Array], num_host_blocks: int, arrays: Arrays) -> None:
        """`stacks` are the cache's memory, [planes, blocks, bytes] each."""
        self._arrays = arrays
        # Copies are faster in words than in bytes.
        word = math.gcd(8, *(stack.shape[2] for stack in stacks))
        self._dtype = {8: "int64", 4: "int32", 2: "int16", 1: "uint8"}[word]
        self._stacks = [arrays.view_as(stack, self._dtype) for stack in stacks]
        self._width = sum(stack.shape[0] * stack.shape[2] for stack in self._stacks)  # words of a block
        self.block_bytes = self._width * word
        self.num_host_blocks = num_host_blocks
        self.blocks_per_piece = max(1, min(num_host_blocks, PIECE_BYTES // (self._width * word)))
        self._pieces: list[Array] = []
        self._staging: Array | None = None

    def save(self, pairs: Pairs) -> None:
        """Copy each (block, host block). Host blocks are distinct."""
        for chunk in self._cut([(host_block, block) for block, host_block in pairs]):
            staging, blocks = self._stage(chunk)
            for stack, staged in self._staged(staging):
                self._arrays.copy(staged, stack[:, blocks])
            for first, last in self._runs(chunk):
                self._arrays.copy(self._host_blocks(chunk[first][0], last - first), staging[first:last])

    def load(self, pairs: Pairs) -> None:
        """Copy each (host block, block). A block may occur twice only if its host blocks hold the same data."""
        for chunk in self._cut(pairs):
            staging, blocks = self._stage(chunk)
            for first, last in self._runs(chunk):
                self._arrays.copy(staging[first:last], self._host_blocks(chunk[first][0], last - first))
            for stack, staged in self._staged(staging):
                stack[:, blocks] = staged

    def read_cache(self, blocks: Sequence[int]) -> bytes:
        """The contents of blocks of the cache, as a host block has them."""
        found = np.empty((len(blocks), self._width), self._dtype)
        numbers = self._arrays.put(blocks, "int64")
        for stack, columns in self._staged(found):
            columns[...] = self._arrays.to_numpy(stack[:, numbers])
        return found.tobytes()

    def read(self, host_blocks: Sequence[int]) -> bytes:
        """The contents of host blocks."""
        self._arrays.synchronize()  # copies to them may not have ended
        return b"".join(self._arrays.to_numpy(self._host_blocks(block, 1)).tobytes() for block in host_blocks)

    def synchronize(self) -> None:
        """Called before `write`: the device may still copy what these host blocks held before."""
        self._arrays.synchronize()

    def write(self, host_block: int, data: memoryview) -> None:
        """Fill a host block."""
        self._arrays.to_numpy(self._host_blocks(host_block, 1)).view(np.uint8)[0] = np.frombuffer(data, np.uint8)

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

    def _stage(self, chunk: Pairs) -> tuple[Array, Array]:
        """The staging buffer for a chunk's blocks, and their numbers on the device."""
        if self._staging is None:
            self._staging = self._arrays.empty((self.blocks_per_piece, self._width), self._dtype)
        return self._staging[: len(chunk)], self._arrays.put([block for _, block in chunk], "int64")

    def _staged(self, staging: Array) -> Iterator[tuple[Array, Array]]:
        """Each stack with its columns of the staging buffer, [planes, blocks, words]."""
        begin = 0
        for stack in self._stacks:
            planes, _, width = stack.shape
            end = begin + planes * width
            yield stack, staging[:, begin:end].reshape(-1, planes, width).swapaxes(0, 1)
            begin = end

    def _host_blocks(self, first: int, count: int) -> Array:
        """Host blocks of one piece, [count, width]. Allocates the pieces up to theirs."""
        index, offset = divmod(first, self.blocks_per_piece)
        while len(self._pieces) <= index:
            size = min(self.blocks_per_piece, self.num_host_blocks - len(self._pieces) * self.blocks_per_piece)
            self._pieces.append(self._arrays.host_empty((size, self._width), self._dtype))
        return self._pieces[index][offset : offset + count]
