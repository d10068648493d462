"""Messages that move requests with their cache from one engine to another: `transfer.py` sends them, `kv_transfer.py`
answers.

The client asks the source for requests (`Export`), reads their blocks and writes them to the target (`ReadBlocks`,
`Import`, `WriteBlocks`), and then submits the requests there. Blocks are numbered from 0 within an export. Each
question has a number, and its reply the same one.
"""

from __future__ import annotations

import msgspec


class RequestCache(msgspec.Struct, array_like=True, frozen=True):
    """What an engine has computed of a request. Tables have the export's block numbers, None behind a window."""

    id: str
    num_tokens: int
    num_computed: int
    tables: list[list[int | None]]
    fixed_tables: list[list[int]]
    num_cached: int
    num_drafted: int
    num_accepted: int


class Export(msgspec.Struct, tag=True, frozen=True):
    """Stop computing these requests, and keep their blocks. Those that have ended are left out of the reply."""

    call: int
    ids: list[str]


class ReadBlocks(msgspec.Struct, tag=True, frozen=True):
    """Blocks of the export that has a number."""

    call: int
    export: int
    first: int
    count: int


class EndExport(msgspec.Struct, tag=True, frozen=True):
    """Release the blocks. Has no reply."""

    export: int


class Import(msgspec.Struct, tag=True, frozen=True):
    """Make room for the blocks of requests that will be submitted. `name` tells imports apart."""

    call: int
    name: str
    fingerprint: str
    num_blocks: int
    requests: list[RequestCache]


class WriteBlocks(msgspec.Struct, tag=True, frozen=True):
    call: int
    name: str
    first: int
    data: bytes


class EndImport(msgspec.Struct, tag=True, frozen=True):
    """Free what no request has taken. Has no reply."""

    name: str


class Exported(msgspec.Struct, tag=True, frozen=True):
    call: int
    num_blocks: int
    block_bytes: int
    requests: list[RequestCache]


class Blocks(msgspec.Struct, tag=True, frozen=True):
    call: int
    data: bytes


class Done(msgspec.Struct, tag=True, frozen=True):
    call: int


class TransferFailed(msgspec.Struct, tag=True, frozen=True):
    call: int
    reason: str


TransferQuestion = Export | ReadBlocks | Import | WriteBlocks
TransferMessage = TransferQuestion | EndExport | EndImport
TransferReply = Exported | Blocks | Done | TransferFailed


def staged_name(name: str, request_id: str) -> str:
    """What an import calls the blocks of one of its requests."""
    return f"{name}/{request_id}"
