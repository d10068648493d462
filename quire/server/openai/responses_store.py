"""ResponseStore: responses that can be asked for again, in memory, and each tenant's apart from all others'.

A tenant's shelf is bounded in number, in bytes and in age; what no longer fits goes, the oldest first. Responses that
are still being made stay: the gate bounds those.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from quire.errors import ResponseNotFound
from quire.server.openai.responses_draft import Draft
from quire.server.stream import encode_json

MAX_RESPONSES = 1024
MAX_BYTES = 64 << 20
MAX_AGE_S = 24 * 3600.0
MAX_GONE = 4096  # ids remembered, to tell what is gone from what never was

Document = dict[str, Any]


@dataclass(eq=False, slots=True)
class Record:
    """A response, the items that it answers, and the task that makes it if it runs in the background."""

    draft: Draft
    items: list[Document]
    log: list[bytes] | None = None  # every event, if they may be asked for again
    task: asyncio.Task[None] | None = None
    created_s: float = 0.0
    num_bytes: int = 0
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def id(self) -> str:
        return str(self.draft.document["id"])

    def note(self, events: list[bytes]) -> None:
        """Keep events for those who follow, and wake them."""
        if self.log is not None:
            self.log += events
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, start: int = 0) -> AsyncIterator[bytes]:
        """The events from a number on, as they come, to the last."""
        assert self.log is not None
        while True:
            if start < len(self.log):
                events = self.log[start:]
                start += len(events)
                yield b"".join(events)
            elif self.draft.ended:
                return
            else:
                await self._news.wait()

    def weigh(self) -> None:
        log = sum(map(len, self.log or ()))
        self.num_bytes = len(encode_json(self.draft.document)) + len(encode_json(self.items)) + log


class Shelf:
    """One tenant's responses, the oldest first."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._gone: OrderedDict[str, str] = OrderedDict()

    def keep(self, record: Record) -> None:
        record.created_s = self._now()
        record.weigh()
        self._records[record.id] = record
        self._make_room()

    def settle(self, record: Record) -> None:
        """The response has ended: it has its size now."""
        if record.id in self._records:
            record.weigh()
            self._make_room()

    def find(self, response_id: str) -> Record:
        self._make_room()
        if record := self._records.get(response_id):
            return record
        if why := self._gone.get(response_id):
            raise ResponseNotFound(f"The response {response_id!r} is gone: {why}.")
        raise ResponseNotFound(f"There is no response {response_id!r}.")

    def drop(self, response_id: str, why: str) -> None:
        self._records.pop(response_id, None)
        self._gone[response_id] = why
        if len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)

    def _make_room(self) -> None:
        num_bytes = sum(record.num_bytes for record in self._records.values())
        for record in [record for record in self._records.values() if record.draft.ended]:
            if record.created_s + MAX_AGE_S < self._now():
                why = f"responses are kept for {MAX_AGE_S / 3600:g} hours"
            elif len(self._records) > MAX_RESPONSES:
                why = f"the last {MAX_RESPONSES:,} responses are kept, and there were more"
            elif num_bytes > MAX_BYTES:
                why = f"{MAX_BYTES >> 20} MiB of responses are kept, and there was more"
            else:
                return
            num_bytes -= record.num_bytes
            self.drop(record.id, why)


class ResponseStore:
    """A shelf for each tenant."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._shelves: dict[str, Shelf] = {}

    def shelf(self, tenant: str) -> Shelf:
        if tenant not in self._shelves:
            self._shelves[tenant] = Shelf(self._now)
        return self._shelves[tenant]
