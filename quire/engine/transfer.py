"""Moves a group of requests with its cache between the engines of two supervisors. `fleet.py` calls this to drain one.

The blocks pass through this process in pieces, a few at a time, so its memory is bounded. The group belongs to the
source until everything has arrived, and then at once to the target. Whichever dies before that, no request is lost:
it is computed again from its tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quire.engine.supervisor import InFlightRequest, Supervised
from quire.engine.transfer_messages import (
    Blocks,
    EndExport,
    EndImport,
    Export,
    Exported,
    Import,
    ReadBlocks,
    TransferFailed,
    TransferReply,
    WriteBlocks,
    staged_name,
)
from quire.errors import EngineClosed, EngineError

PIECE_BYTES = 4 << 20  # of one message
MAX_PIECES = 4  # read before the first of them is written


class MoveFailed(EngineError):
    """An engine could not give or take a cache. The message is the reason."""


@dataclass(frozen=True, slots=True)
class Departure:
    """Requests that have left an engine, which keeps their blocks."""

    source: Supervised
    exported: Exported
    group: list[InFlightRequest]  # those that had not ended

    @property
    def num_bytes(self) -> int:
        return self.exported.num_blocks * self.exported.block_bytes

    @property
    def num_computed(self) -> int:
        return sum(cache.num_computed for cache in self.exported.requests)

    @property
    def still_there(self) -> list[InFlightRequest]:
        """Those that have not been aborted, and that the source has not given to another supervisor."""
        return [in_flight for in_flight in self.group if self.source.has(in_flight)]

    def end(self) -> None:
        self.source.tell(EndExport(self.exported.call))


async def depart(source: Supervised, group: Sequence[InFlightRequest]) -> Departure:
    """Let a group leave the source's engine. Raises EngineClosed if the engine dies."""
    reply = await source.call(Export, [in_flight.wire_id for in_flight in group])
    assert isinstance(reply, Exported)
    left = {cache.id for cache in reply.requests}
    return Departure(source, reply, [in_flight for in_flight in group if in_flight.wire_id in left])


async def copy_cache(departure: Departure, target: Supervised, name: str, fingerprint: str) -> None:
    """Copy the blocks of a group to the target's engine. Raises EngineError if one of the engines fails."""
    exported = departure.exported
    check(await target.call(Import, name, fingerprint, exported.num_blocks, exported.requests))
    for pieces in pieces_of(exported):
        reads = [departure.source.call(ReadBlocks, exported.call, first, count) for first, count in pieces]
        sizes = [count * exported.block_bytes for _, count in pieces]
        contents = [contents_of(reply, size) for reply, size in zip(await gather(reads), sizes, strict=True)]
        writes = [
            target.call(WriteBlocks, name, first, data) for (first, _), data in zip(pieces, contents, strict=True)
        ]
        for reply in await gather(writes):
            check(reply)
    if not target.health():
        raise EngineClosed("The engine died after the last block.")


def arrive(departure: Departure, target: Supervised, name: str) -> list[InFlightRequest]:
    """Give the group to the target, whose engine has its blocks. Returns those that have not ended meanwhile."""
    group = departure.still_there
    departure.source.release(group)
    for in_flight in group:
        in_flight.staged = staged_name(name, in_flight.wire_id)
    if group:
        target.adopt(group)
    departure.end()
    target.tell(EndImport(name))
    return group


def pieces_of(exported: Exported) -> Iterator[list[tuple[int, int]]]:
    """The blocks of an export as (first, count), a few pieces at a time."""
    size = max(1, PIECE_BYTES // max(1, exported.block_bytes))
    pieces = [
        (first, min(size, exported.num_blocks - first)) for first in range(0, exported.num_blocks, size)
    ]  # fmt: skip
    return (pieces[first : first + MAX_PIECES] for first in range(0, len(pieces), MAX_PIECES))


async def gather(calls: Sequence[object]) -> list[TransferReply]:
    """All replies. If an engine dies, all calls to it fail, and the first error is raised."""
    replies = await asyncio.gather(*calls, return_exceptions=True)  # type: ignore[call-overload]
    for reply in replies:
        if isinstance(reply, BaseException):
            raise reply
    return list(replies)


def contents_of(reply: TransferReply, num_bytes: int) -> bytes:
    """The blocks that were asked for, and no fewer: the target would go on with what its memory held before."""
    check(reply)
    if not isinstance(reply, Blocks) or len(reply.data) != num_bytes:
        raise MoveFailed("the source sent other blocks than it was asked for")
    return reply.data


def check(reply: TransferReply) -> TransferReply:
    if isinstance(reply, TransferFailed):
        raise MoveFailed(reply.reason)
    return reply
