"""BlockPool: fixed-size blocks of the KV cache by number, with reference counts and an O(1) free list.

A block without references is on the free list, whose order is the order of eviction. `touch` takes a block that still
holds published content off the list again. The contents of blocks are tracked elsewhere. Only `KVCache` calls this.
"""

from __future__ import annotations


class BlockPool:
    """Blocks 1 to num_blocks. Block 0 is never allocated: padded table entries may point at it.

    The free list is intrusive and circular: `_next` and `_previous` hold block numbers, with 0 at both ends.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.refs = [0] * (num_blocks + 1)
        self.num_allocations = [0] * (num_blocks + 1)  # of each block: a new one means new contents
        self.changed: set[int] | None = None  # blocks whose references have changed; None: nobody follows them
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._previous: list[int] = [num_blocks, *range(num_blocks)]

    def allocate(self) -> int:
        """Take the first block of the free list, with one reference. The caller has checked `num_free`."""
        block = self._next[0]
        assert block, "no free block"
        self._unlink(block)
        self.refs[block] = 1
        self.num_allocations[block] += 1
        if self.changed is not None:
            self.changed.add(block)
        return block

    def touch(self, block: int) -> None:
        """Add a reference to a block, which may be on the free list."""
        if self.refs[block] == 0:
            self._unlink(block)
        self.refs[block] += 1
        if self.changed is not None:
            self.changed.add(block)

    def release(self, block: int, *, keep: bool) -> None:
        """Drop a reference. A block without any is evicted last if `keep` is set, otherwise first."""
        assert self.refs[block] > 0, f"block {block} is released too often: it has no references"
        self.refs[block] -= 1
        if self.refs[block] == 0:
            self._link(block, after=self._previous[0] if keep else 0)
        if self.changed is not None:
            self.changed.add(block)

    def free_order(self) -> list[int]:
        """The free list in order of eviction. For tests."""
        order, block = [], self._next[0]
        while block:
            order.append(block)
            block = self._next[block]
        return order

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self.num_free -= 1

    def _link(self, block: int, after: int) -> None:
        following = self._next[after]
        self._next[after], self._previous[block] = block, after
        self._next[block], self._previous[following] = following, block
        self.num_free += 1
