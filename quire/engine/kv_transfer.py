"""KVTransfer: the engine's side of a move. Requests leave with the blocks that they have computed, or arrive with them.

A request that leaves is detached from the scheduler and keeps its blocks until the client has read them. One that
arrives is in host blocks, as a preempted request that was swapped out, and is swapped in when there is room. So nothing
is computed again, and the same bits go on. `process.py` calls this.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

from quire.core.kv_cache import KVCache, ceil_div
from quire.core.plan import Update
from quire.core.request import Request
from quire.core.swap import Swap, SwappedOut
from quire.engine.engine import Engine
from quire.engine.transfer_messages import (
    Blocks,
    Done,
    EndExport,
    EndImport,
    Export,
    Exported,
    Import,
    ReadBlocks,
    RequestCache,
    TransferFailed,
    TransferMessage,
    TransferReply,
    WriteBlocks,
    staged_name,
)

NOTHING = SwappedOut(0, [], [])

log = logging.getLogger("quire.engine")


@dataclass(slots=True)
class BlockList:
    """The blocks of an export: (is on the host, number), each once, in the order of their numbers in the export."""

    numbers: dict[tuple[bool, int], int] = field(default_factory=dict)

    def add(self, block: int, *, on_host: bool) -> int:
        return self.numbers.setdefault((on_host, block), len(self.numbers))


@dataclass(frozen=True, slots=True)
class OpenExport:
    """Requests that have left, and their blocks."""

    requests: list[Request]
    blocks: list[tuple[bool, int]]


class OpenImport:
    """Host blocks that wait for the contents of an export's blocks, and for their requests."""

    def __init__(self, message: Import) -> None:
        self.name = message.name
        self.caches = {cache.id: cache for cache in message.requests if cache.num_computed}
        self.targets: list[list[int]] = [[] for _ in range(message.num_blocks)]  # host blocks, by block of the export
        self.unwritten = set(range(message.num_blocks))
        self.staged: dict[str, SwappedOut] = {}

    def add(self, staged: SwappedOut, cache: RequestCache) -> None:
        self.staged[staged_name(self.name, cache.id)] = staged
        numbers = [number for table in cache.tables for number in table if number is not None]
        numbers += [number for table in cache.fixed_tables for number in table]
        for number, host_block in zip(numbers, staged.host_blocks, strict=True):
            self.targets[number].append(host_block)

    def is_staged(self, swap: Swap) -> bool:
        """Whether the host blocks are still kept for these requests: a reset frees them."""
        return all(swap.staged.get(name) is staged for name, staged in self.staged.items())


class KVTransfer:
    """The moves of one engine, in and out."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._exports: dict[int, OpenExport] = {}
        self._imports: dict[str, OpenImport] = {}

    def handle(self, message: TransferMessage) -> tuple[list[Update], TransferReply | None]:
        """The updates of plans that had to be committed first, and the reply."""
        match message:
            case Export():
                return self._export(message)
            case ReadBlocks():
                return [], self._read(message)
            case EndExport(export):
                self._end_export(export)
            case Import():
                return [], self._import(message)
            case WriteBlocks():
                return [], self._write(message)
            case EndImport(name):
                self._end_import(name)
        return [], None

    def arrive(self, request: Request, staged: str) -> None:
        """A request whose blocks were imported has been added. Without them it is computed again."""
        blocks = self._engine.scheduler.swap.take_staged(staged)
        name, _, request_id = staged.rpartition("/")
        if blocks is None or (open_import := self._imports.get(name)) is None:
            return
        cache = open_import.caches[request_id]
        request.swapped_out = blocks
        if cache.num_tokens != len(request.tokens):
            log.error("a request has %d tokens and came with the cache of %d", len(request.tokens), cache.num_tokens)
            self._engine.scheduler.swap.drop(request)
        elif open_import.unwritten:
            log.error("a request came without %d blocks of its cache", len(open_import.unwritten))
            self._engine.scheduler.swap.drop(request)
        request.num_preemptions = 1  # it is resumed: what it found in the cache was counted when it was first admitted
        request.num_cached = cache.num_cached
        request.num_drafted, request.num_accepted = cache.num_drafted, cache.num_accepted

    # ── out ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _export(self, message: Export) -> tuple[list[Update], Exported]:
        updates, requests = self._engine.detach(message.ids)
        blocks = BlockList()
        caches = [self._describe(request, blocks) for request in requests]
        self._exports[message.call] = OpenExport(requests, list(blocks.numbers))
        return updates, Exported(message.call, len(blocks.numbers), self._engine.runner.cache.host.block_bytes, caches)

    def _describe(self, request: Request, blocks: BlockList) -> RequestCache:
        """What the request has computed. Its blocks are added to `blocks`.

        Beams are computed again, and so is what several ranks have computed: each has a part of every block.
        """
        is_movable = request.beam is None and self._engine.runner.cache.is_whole
        computed, on_host = find_computed(request, self._engine.scheduler.kv) if is_movable else (NOTHING, False)
        pending = self._engine.scheduler.swap.pending_sources if on_host else {}

        def add(block: int) -> int:
            source = pending.get(block)
            return blocks.add(block, on_host=on_host) if source is None else blocks.add(source, on_host=False)

        return RequestCache(
            request.id,
            len(request.tokens),
            computed.num_computed,
            [[None if block is None else add(block) for block in table] for table in computed.tables],
            [list(map(add, table)) for table in computed.fixed_tables],
            request.num_cached,
            request.num_drafted,
            request.num_accepted,
        )  # fmt: skip

    def _read(self, message: ReadBlocks) -> Blocks | TransferFailed:
        export = self._exports.get(message.export)
        if export is None or not all(map(self._engine.scheduler.is_detached, export.requests)):
            return TransferFailed(message.call, "the source has lost the cache")
        wanted = export.blocks[message.first : message.first + message.count]
        return Blocks(message.call, b"".join(self._read_run(on_host, run) for on_host, run in group_runs(wanted)))

    def _read_run(self, on_host: bool, blocks: Sequence[int]) -> bytes:
        host = self._engine.runner.cache.host
        return host.read(blocks) if on_host else host.read_cache(blocks)

    def _end_export(self, number: int) -> None:
        if (export := self._exports.pop(number, None)) is not None:
            for request in export.requests:
                self._engine.scheduler.release_detached(request.id)

    # ── in ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _import(self, message: Import) -> Done | TransferFailed:
        scheduler = self._engine.scheduler
        if message.fingerprint != self._engine.info.fingerprint or not self._engine.runner.cache.is_whole:
            return TransferFailed(message.call, "the target has another model or another kind of cache")
        fitting = all(fits(cache, message.num_blocks, scheduler.kv) for cache in message.requests)
        if not fitting or len(named_blocks(message.requests)) != message.num_blocks:
            return TransferFailed(message.call, "the block tables do not fit the target's cache")
        open_import = self._imports[message.name] = OpenImport(message)
        for cache in open_import.caches.values():
            wanted = SwappedOut(cache.num_computed, cache.tables, cache.fixed_tables)
            staged = scheduler.swap.stage(staged_name(message.name, cache.id), wanted)
            if staged is None:
                self._end_import(message.name)
                return TransferFailed(message.call, "the target has no room for the cache")
            open_import.add(staged, cache)
        return Done(message.call)

    def _write(self, message: WriteBlocks) -> Done | TransferFailed:
        open_import, host = self._imports.get(message.name), self._engine.runner.cache.host
        if open_import is None or not open_import.is_staged(self._engine.scheduler.swap):
            return TransferFailed(message.call, "the target has lost the cache")
        data, size = memoryview(message.data), host.block_bytes
        if len(data) % size or not 0 <= message.first <= len(open_import.targets) - len(data) // size:
            return TransferFailed(message.call, "the blocks do not fit the target's cache")
        host.synchronize()
        for number in range(len(data) // size):
            for host_block in open_import.targets[message.first + number]:
                host.write(host_block, data[number * size : (number + 1) * size])
            open_import.unwritten.discard(message.first + number)
        return Done(message.call)

    def _end_import(self, name: str) -> None:
        if (open_import := self._imports.pop(name, None)) is not None:
            for staged in open_import.staged:
                self._engine.scheduler.swap.drop_staged(staged)


def find_computed(request: Request, kv: KVCache) -> tuple[SwappedOut, bool]:
    """What a request that has left has computed, and whether it is on the host."""
    if request.swapped_out is not None:
        return request.swapped_out, True
    num_computed = request.num_computed
    if not num_computed or not kv.holds_context(request, num_computed):
        return NOTHING, False
    num_blocks = ceil_div(num_computed, kv.block_size)
    return SwappedOut(num_computed, [table[:num_blocks] for table in request.tables], request.fixed_tables), False


def fits(cache: RequestCache, num_blocks: int, kv: KVCache) -> bool:
    """Whether block tables that a peer has sent are those of a request in this cache."""
    if not cache.num_computed:
        return not cache.tables and not cache.fixed_tables
    named = SwappedOut(cache.num_computed, cache.tables, cache.fixed_tables).host_blocks
    return (
        0 < cache.num_computed < cache.num_tokens
        and [len(table) for table in cache.tables] == [ceil_div(cache.num_computed, kv.block_size)] * len(kv.windows)
        and len(cache.fixed_tables) == kv.num_encoder_groups + kv.num_state_groups
        and all(0 <= block < num_blocks for block in named)
    )


def named_blocks(caches: Sequence[RequestCache]) -> set[int]:
    """The export's blocks that requests have."""
    tables = [SwappedOut(cache.num_computed, cache.tables, cache.fixed_tables) for cache in caches]
    return {block for table in tables for block in table.host_blocks}


def group_runs(blocks: Sequence[tuple[bool, int]]) -> list[tuple[bool, list[int]]]:
    """Consecutive blocks that are all on the host, or all in the cache."""
    return [(on_host, [block for _, block in run]) for on_host, run in groupby(blocks, itemgetter(0))]
