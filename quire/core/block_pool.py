"""BlockPool: fixed-size blocks of the KV cache by number, with reference counts and an O(1) free list.

The pool does not know what a block holds. A block with no references is on the free list; its place there is its place
in the order of eviction. A free block that still holds published content can be taken back by `revive` until its turn
comes. Only `KVCache` calls this.
"""

from __future__ import annotations


class BlockPool:
    """Blocks 1..num_blocks. Number 0 is never given out: padded table entries may point at it.

    The free list is intrusive and circular: `_next` and `_previous` hold block numbers, with 0 as both ends.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.refs = [0] * (num_blocks + 1)
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._previous: list[int] = [num_blocks, *range(num_blocks)]

    def take(self) -> int:
        """The free block whose turn it is, with one reference. The caller knows that there is one."""
        block = self._next[0]
        assert block, "no free block"
        self._unlink(block)
        self.refs[block] = 1
        return block

    def revive(self, block: int) -> None:
        """One more reference to a block that may be free."""
        if self.refs[block] == 0:
            self._unlink(block)
        self.refs[block] += 1

    def release(self, block: int, *, keep: bool) -> None:
        """One reference less. A block that reaches none is evicted last if it is worth keeping, else first."""
        assert self.refs[block] > 0, f"block {block} released once too often"
        self.refs[block] -= 1
        if self.refs[block] == 0:
            self._link(block, after=self._previous[0] if keep else 0)

    def free_order(self) -> list[int]:
        """The free list from first to last to be evicted. For tests."""
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
