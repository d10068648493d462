"""ResponseStore: responses in memory, to be fetched or continued later. Each tenant has its own.

A tenant's responses are limited in number, bytes and age; the oldest are evicted first. A response that is still being
generated is not evicted; admission control limits those.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from quire.errors import ResponseNotFound
from quire.server.openai.responses.builder import ResponseBuilder
from quire.server.streaming import encode_json

MAX_RESPONSES = 1024
MAX_BYTES = 64 << 20
MAX_AGE_S = 24 * 3600.0
MAX_EVICTED_IDS = 4096  # ids whose reason of eviction is kept, for the error message

Document = dict[str, Any]


@dataclass(eq=False, slots=True)
class StoredResponse:
    """A response with its input items, and the task that generates it if it runs in the background."""

    builder: ResponseBuilder
    items: list[Document]
    events: list[bytes] | None = None  # all events, if clients may fetch them
    task: asyncio.Task[None] | None = None
    created_s: float = 0.0
    num_bytes: int = 0
    _appended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def id(self) -> str:
        return str(self.document["id"])

    @property
    def document(self) -> Document:
        return self.builder.document

    def append(self, events: list[bytes]) -> None:
        """Add events, and wake the streams that read them."""
        if self.events is not None:
            self.events += events
        self._appended.set()
        self._appended = asyncio.Event()

    async def stream(self, start: int = 0) -> AsyncIterator[bytes]:
        """The events from number `start` to the last, as they are generated."""
        assert self.events is not None
        while True:
            if start < len(self.events):
                events = self.events[start:]
                start += len(events)
                yield b"".join(events)
            elif self.builder.ended:
                return
            else:
                await self._appended.wait()

    def update_size(self) -> None:
        events = sum(map(len, self.events or ()))
        self.num_bytes = len(encode_json(self.document)) + len(encode_json(self.items)) + events


class TenantResponses:
    """The responses of one tenant, the oldest first."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._removed: OrderedDict[str, str] = OrderedDict()  # id -> reason

    def add(self, stored: StoredResponse) -> None:
        stored.created_s = self._now()
        stored.update_size()
        self._responses[stored.id] = stored
        self._evict()

    def update_size(self, stored: StoredResponse) -> None:
        """The response has ended and does not grow any more."""
        if stored.id in self._responses:
            stored.update_size()
            self._evict()

    def find(self, response_id: str) -> StoredResponse:
        self._evict()
        if stored := self._responses.get(response_id):
            return stored
        if reason := self._removed.get(response_id):
            raise ResponseNotFound(f"The response {response_id!r} is gone: {reason}.")
        raise ResponseNotFound(f"There is no response {response_id!r}.")

    def remove(self, response_id: str, reason: str) -> None:
        self._responses.pop(response_id, None)
        self._removed[response_id] = reason
        if len(self._removed) > MAX_EVICTED_IDS:
            self._removed.popitem(last=False)

    def _evict(self) -> None:
        num_bytes = sum(stored.num_bytes for stored in self._responses.values())
        for stored in [stored for stored in self._responses.values() if stored.builder.ended]:
            if stored.created_s + MAX_AGE_S < self._now():
                reason = f"responses are kept for {MAX_AGE_S / 3600:g} hours"
            elif len(self._responses) > MAX_RESPONSES:
                reason = f"the last {MAX_RESPONSES:,} responses are kept, and there were more"
            elif num_bytes > MAX_BYTES:
                reason = f"{MAX_BYTES >> 20} MiB of responses are kept, and there was more"
            else:
                return
            num_bytes -= stored.num_bytes
            self.remove(stored.id, reason)


class ResponseStore:
    """The responses of all tenants."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._tenants: dict[str, TenantResponses] = {}

    def for_tenant(self, tenant: str) -> TenantResponses:
        if tenant not in self._tenants:
            self._tenants[tenant] = TenantResponses(self._now)
        return self._tenants[tenant]
