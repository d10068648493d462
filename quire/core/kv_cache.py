"""KVCache: which blocks hold a request's keys and values. It has block numbers only; the engine has the tensors.

A block may be written only while one request refers to it and it is not published. Otherwise the writer gets a copy.
Layers are grouped by attention window. Each group has its own block table, and all groups share one pool. Only the
scheduler calls this.

Two kinds of groups do not grow with the request. An encoder group holds what cross-attention reads. It is filled once,
by the request's first step. A state group holds one block of constant size, which every step rewrites (Mamba, linear
attention). Both get all their blocks at admission and keep them until the request ends or is preempted. Neither is in
the prefix tree. The salt of decoder blocks includes the encoder's input (`Request.salt`). With state groups there is no
prefix look-up and no fork, because the state at the end of a shared prefix is not kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.block_pool import BlockPool
from quire.core.prefix_tree import Match, Node, PrefixTree, first_block
from quire.core.request import NEVER, Request, State
from quire.core.swap import Pairs


class KVCache:
    """Blocks for requests: shared by prefix, copied on write, freed behind windows."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        windows: Sequence[int | None] = (None,),
        *,
        num_encoder_groups: int = 0,
        num_state_groups: int = 0,
        prefix_cache: bool = True,
    ) -> None:
        """`windows` has an entry for each group that grows with the request."""
        self.block_size = block_size
        self.windows = tuple(windows)
        self.num_encoder_groups = num_encoder_groups
        self.num_state_groups = num_state_groups
        self.prefix_cache = prefix_cache and not num_state_groups
        self.has_windows = any(window is not None for window in self.windows)
        self.step = 0  # the scheduler's step, recorded with evictions
        self.filling: set[int] = set()  # blocks that the plan being made both publishes and computes
        self.pool = BlockPool(num_blocks)
        self.tree = self._empty_tree()

    def reset(self) -> None:
        """Free all blocks and publish none. The caller clears the requests' block tables."""
        self.filling.clear()
        num_allocations = self.pool.num_allocations
        self.pool = BlockPool(self.pool.num_blocks)
        self.pool.num_allocations = num_allocations
        self.tree = self._empty_tree()

    def peak(self, length: int, max_count: int, num_encoder_tokens: int = 0) -> int:
        grown = peak_blocks(length, max_count, self.block_size, self.windows)
        return grown + self.num_fixed(num_encoder_tokens)

    def num_fixed(self, num_encoder_tokens: int) -> int:
        """Blocks of the groups that do not grow."""
        return fixed_blocks(num_encoder_tokens, self.block_size, self.num_encoder_groups, self.num_state_groups)

    def beams_peak(self, num_shared: int, length: int, width: int, max_count: int) -> int:
        """The most blocks that `width` beams of `length` tokens hold at once if they share the first `num_shared`."""
        num_full, num_blocks = num_shared // self.block_size, ceil_div(length, self.block_size)
        together = num_full + width * (num_blocks - num_full)
        return sum(
            min(together, width * peak_blocks(length, max_count, self.block_size, [window])) for window in self.windows
        )

    def lookup(self, request: Request) -> Match:
        """The longest cached prefix of the request. It excludes the last token, whose logits are needed."""
        if not self.prefix_cache or request.params.prompt_logprobs is not None:
            return Match()
        return self.tree.lookup(request.tokens, request.salt, len(request.tokens) - 1)

    def num_blocks_to_admit(self, request: Request, match: Match, max_count: int) -> int:
        """Free blocks that admitting the request uses, with the matched blocks that are on the free list."""
        found = [block for table in self._matched_tables(request, match) for block in table if block is not None]
        num_unused = sum(self.pool.refs[block] == 0 for block in found)
        return self.peak(len(request.tokens), max_count, len(request.encoder_tokens)) - len(found) + num_unused

    def num_missing_blocks(self, request: Request, max_count: int) -> int:
        """Blocks that a running request still needs for the tokens it has."""
        if request.capacity >= len(request.tokens):
            return 0
        held = sum(block is not None for table in request.tables for block in table)
        return max(0, peak_blocks(len(request.tokens), max_count, self.block_size, self.windows) - held)

    def attach_prefix(self, request: Request, match: Match, copies: Pairs) -> None:
        """Start the request from the matched prefix, and allocate its encoder and state blocks.

        The caller has checked `num_blocks_to_admit`.
        """
        tables = self._matched_tables(request, match)
        self._touch(tables)
        self._set_publish_parent(request, match)
        end = match.path[-1] if match.path else None
        num_tokens = len(match.path) * self.block_size
        if match.partial is not None and self._copy_partial(match.partial, tables, copies):
            num_tokens += match.num_partial
            end = match.partial
        if end is not None:
            end.num_hits += 1
        self._allocate_fixed(request)
        self._set_tables(request, tables, num_tokens)
        if match.num_partial and self.has_windows:
            self.trim(request)  # the copied tokens may move the window past a matched block

    def swap_in(self, request: Request, match: Match, pairs: Pairs) -> None:
        """Resume the request from its host blocks: the matched blocks are reused, the others are copied to new blocks.

        The caller has checked `num_blocks_to_admit`, and that the plan's copies read no free block. A new block could
        be such a source, and is filled before the copies run.
        """
        assert request.swapped_out is not None
        tables = self._matched_tables(request, match)
        self._touch(tables)
        self._set_publish_parent(request, match)
        for table, host_blocks in zip(tables, request.swapped_out.tables, strict=True):
            unmatched = host_blocks[len(match.path) :]
            table.extend(None if each is None else self._swap_in_block(each, pairs) for each in unmatched)
        request.fixed_tables = [
            [self._swap_in_block(host_block, pairs) for host_block in host_blocks]
            for host_blocks in request.swapped_out.fixed_tables
        ]
        self._set_tables(request, tables, request.swapped_out.num_computed)

    def can_fork(self, request: Request) -> bool:
        """Whether the leader holds all blocks of the encoder and of the prompt without its last token."""
        leader, num_shared = request.leader, request.num_prompt - 1
        if leader is None or leader.state is not State.RUNNING or leader.num_computed < num_shared:
            return False
        return not self.num_state_groups and leader.salt == request.salt and self.holds_context(leader, num_shared)

    def fork(self, request: Request) -> bool:
        """Share the leader's blocks, if `can_fork`. Returns whether it did."""
        if request.leader is None or not self.can_fork(request):
            return False
        self.share_blocks(request.leader, request, request.num_prompt - 1)
        return True

    def holds_context(self, request: Request, num_tokens: int) -> bool:
        """Whether the request holds all blocks that a token at position `num_tokens` attends to."""
        num_blocks = ceil_div(num_tokens, self.block_size)
        return not any(
            None in table[first_block(num_tokens, window, self.block_size) : num_blocks]
            for table, window in zip(request.tables, self.windows, strict=True)
        )

    def share_blocks(self, source: Request, target: Request, num_tokens: int) -> None:
        """Start the target from the source's first `num_tokens`, which are computed. The target holds no blocks.

        Both refer to the same blocks. The first one to write to the last, partly filled block gets a copy (`grow`).
        """
        num_blocks = ceil_div(num_tokens, self.block_size)
        tables = [table[:num_blocks] for table in source.tables]
        self._touch(tables)
        target.fixed_tables = [list(table) for table in source.fixed_tables]
        self._touch(target.fixed_tables)
        self._set_tables(target, tables, num_tokens)
        source.capacity = min(source.capacity, source.num_planned)  # so that its next write goes through `grow`
        node = source.node
        while node is not None and node.depth > num_tokens // self.block_size:
            node = node.parent
        self._move_pin(target, node)
        target.publish_at = (node.depth + 1) * self.block_size if node else NEVER

    def grow(self, request: Request, end: int, copies: Pairs) -> bool:
        """Make positions up to `end` writable. Returns False and changes nothing if too few blocks are free."""
        index = request.num_planned // self.block_size
        num_blocks = ceil_div(end, self.block_size)
        shared = self._shared_tables(request, index)
        if len(shared) + num_new_blocks(request, num_blocks) > self.pool.num_free:
            return False
        for table in shared:
            source, target = table[index], self._allocate()
            assert source is not None, "a block to be written is behind the window"
            copies.append((source, target))
            self._release(source)
            table[index] = target
        for table in request.tables:
            table.extend(self._allocate() for _ in range(num_blocks - len(table)))
        request.capacity = num_blocks * self.block_size
        return True

    def num_blocks_to_grow(self, request: Request, end: int) -> int:
        """Free blocks that `grow` uses."""
        if end <= request.capacity:
            return 0
        num_shared = len(self._shared_tables(request, request.num_planned // self.block_size))
        return num_shared + num_new_blocks(request, ceil_div(end, self.block_size))

    def give_back(self, request: Request, end: int) -> bool:
        """Release the blocks behind position `end`, which were allocated for drafts. Returns whether any were."""
        num_blocks = ceil_div(end, self.block_size)
        released = [block for table in request.tables for block in table[num_blocks:] if block is not None]
        for table in request.tables:
            del table[num_blocks:]
        for block in released:
            self._release(block)
        request.capacity = min(request.capacity, num_blocks * self.block_size)
        return bool(released)

    def has_writable(self, request: Request) -> bool:
        """Whether the next position is in a block that may be written, or in one that is not allocated yet."""
        index = request.num_planned // self.block_size
        return all(index >= len(table) or self._writable(table[index]) for table in request.tables)

    def begin_plan(self, step: int) -> None:
        """A new plan is being made. The blocks of earlier plans are filled by the time it runs."""
        self.step = step
        self.filling.clear()

    def publish(self, request: Request, end: int) -> None:
        """Publish the full blocks of the first `end` tokens in the prefix tree. All of them are in `tokens`."""
        assert request.node is not None
        node, size, insert = request.node, self.block_size, self.tree.insert
        first, stop = request.publish_at // size - 1, end // size
        tokens = tuple(request.tokens[first * size : stop * size])
        blocks = zip(*(table[first:stop] for table in request.tables), strict=True)
        for start, its_blocks in zip(range(0, len(tokens), size), blocks, strict=True):
            node = insert(node, tokens[start : start + size], its_blocks)
        request.publish_at = (stop + 1) * size
        self._move_pin(request, node)

    def publish_planned(self, request: Request) -> None:
        """Publish blocks that a row of several tokens fills in the plan being made.

        Rows of the same plan and of later ones may share them: in a step that has such a row, each layer stores all
        keys before it reads any. They cannot be copied before the plan has run.
        """
        end = min(request.num_planned, len(request.tokens))
        if end >= request.publish_at:
            first, stop = request.publish_at // self.block_size - 1, end // self.block_size
            for table in request.tables:
                self.filling.update(block for block in table[first:stop] if block is not None)
            self.publish(request, end)

    def unpublish(self, blocks: set[int]) -> None:
        """Remove blocks with invalid contents from the prefix tree."""
        unpublished = blocks & self.tree.owners.keys()
        for block in unpublished:
            self.tree.forget(block, self.step)
        if self.pool.changed is not None:
            self.pool.changed |= unpublished  # those without references are free instead of cached

    def trim(self, request: Request) -> None:
        """Release the blocks behind the window, to which no later token of the request attends."""
        for table, window in zip(request.tables, self.windows, strict=True):
            index = first_block(request.num_computed, window, self.block_size) - 1
            while index >= 0 and (block := table[index]) is not None:
                self._release(block)
                table[index] = None
                index -= 1

    def release(self, request: Request) -> None:
        """Release all blocks of the request, the last first, so that the first ones are evicted last."""
        for index in range(max((len(table) for table in request.tables), default=0) - 1, -1, -1):
            for table in request.tables:
                if index < len(table) and (block := table[index]) is not None:
                    self._release(block)
        for fixed in request.fixed_tables:
            for block in fixed:
                self._release(block)
        request.tables, request.fixed_tables = [], []
        request.capacity = request.num_computed = request.num_planned = 0
        request.publish_at = NEVER
        self._move_pin(request, None)

    def _empty_tree(self) -> PrefixTree:
        return PrefixTree(self.block_size, self.windows, max_evicted=2 * self.pool.num_blocks)

    def _set_tables(self, request: Request, tables: list[list[int | None]], num_tokens: int) -> None:
        request.tables = tables
        request.num_computed = request.num_planned = num_tokens
        request.capacity = num_tokens

    def _set_publish_parent(self, request: Request, match: Match) -> None:
        """Pin the match's last node, below which the request publishes.

        This precedes any allocation, because the pin may be all that keeps the node in the tree.
        """
        if self.prefix_cache:
            self._move_pin(request, match.path[-1] if match.path else self.tree.root(request.salt))
            request.publish_at = (len(match.path) + 1) * self.block_size

    def _matched_tables(self, request: Request, match: Match) -> list[list[int | None]]:
        """The match as block tables, with None for blocks behind the window of the request's next token."""
        end = len(match.path) * self.block_size
        if request.swapped_out is not None and request.swapped_out.num_computed > end:
            end = request.swapped_out.num_computed
        firsts = [first_block(end, window, self.block_size) for window in self.windows]
        return [
            [node.blocks[group] if index >= first else None for index, node in enumerate(match.path)]
            for group, first in enumerate(firsts)
        ]

    def _allocate_fixed(self, request: Request) -> None:
        num_encoder = ceil_div(len(request.encoder_tokens), self.block_size)
        sizes = [num_encoder] * self.num_encoder_groups + [1] * self.num_state_groups
        request.fixed_tables = [[self._allocate() for _ in range(size)] for size in sizes]

    def _touch(self, tables: Sequence[Sequence[int | None]]) -> None:
        for table in tables:
            for block in table:
                if block is not None:
                    self.pool.touch(block)

    def _copy_partial(self, node: Node, tables: list[list[int | None]], copies: Pairs) -> bool:
        """Append a private copy of the node's blocks. Returns False if they are being filled or too few are free."""
        sources = [block for block in node.blocks if block is not None]
        if not self.filling.isdisjoint(sources):
            return False
        for block in sources:
            self.pool.touch(block)  # so that it is not allocated as a target
        enough = self.pool.num_free >= len(sources)
        if enough:
            for table, source in zip(tables, sources, strict=True):
                target = self._allocate()
                copies.append((source, target))
                table.append(target)
        for block in sources:
            self._release(block)
        return enough

    def _swap_in_block(self, host_block: int, pairs: Pairs) -> int:
        block = self._allocate()
        pairs.append((host_block, block))
        return block

    def _allocate(self) -> int:
        block = self.pool.allocate()
        if block in self.tree.owners:
            self.tree.forget(block, self.step)
        return block

    def _release(self, block: int) -> None:
        self.pool.release(block, keep=block in self.tree.owners)

    def _shared_tables(self, request: Request, index: int) -> list[list[int | None]]:
        """The block tables whose entry at `index` has to be copied before it is written."""
        return [table for table in request.tables if index < len(table) and not self._writable(table[index])]

    def _writable(self, block: int | None) -> bool:
        return block is not None and self.pool.refs[block] == 1 and block not in self.tree.owners

    def _move_pin(self, request: Request, node: Node | None) -> None:
        """Pin `node`, below which the request publishes next, and unpin the node before it."""
        before = request.node
        if node is before:
            return
        if node is not None:
            node.pins += 1
        request.node = node
        if before is not None:
            before.pins -= 1
            self.tree.prune(before)


def num_new_blocks(request: Request, num_blocks: int) -> int:
    """Blocks that its tables lack if each is to have `num_blocks`."""
    return sum(max(0, num_blocks - len(table)) for table in request.tables)


def peak_blocks(length: int, max_count: int, block_size: int, windows: Sequence[int | None]) -> int:
    """The most blocks that a request of `length` tokens holds at once if a step computes up to `max_count` of them."""
    num_blocks = ceil_div(length, block_size)
    return sum(
        num_blocks if window is None else min(num_blocks, ceil_div(window - 1 + max_count, block_size) + 1)
        for window in windows
    )


def fixed_blocks(num_encoder_tokens: int, block_size: int, num_encoder_groups: int, num_state_groups: int) -> int:
    """The blocks of a request that do not depend on its length."""
    return num_encoder_groups * ceil_div(num_encoder_tokens, block_size) + num_state_groups


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
