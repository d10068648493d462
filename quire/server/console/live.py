"""LiveView: the engines of a server as they run, for everyone who watches. One subscription serves all watchers.

Engines report to `on_changes` while somebody watches. Nothing is queued for a watcher: it goes on from the sequence
that it has been sent, or from a snapshot.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator

from quire.engine.live_changes import CacheDescription, LiveChanges
from quire.server.console.documents import Document
from quire.server.console.lives import Lives
from quire.server.console.mirror import Mirror
from quire.server.engines import EngineClient
from quire.server.metrics import Metrics
from quire.server.streaming import encode_json

log = logging.getLogger("quire.server")

INTERVAL_S = 0.1  # between two messages of an engine
PING_S = 2.0
MAX_NODES = 2000  # of a prefix tree
MAX_AGE_S = 1.0


class Position:
    """What one watcher has been sent of one engine."""

    def __init__(self) -> None:
        self.sequence: int | None = None  # None: nothing
        self.is_ready = True  # as the watcher knows it


class LiveView:
    """Mirrors of all engines, and the watchers' event."""

    def __init__(self, client: EngineClient, metrics: Metrics, num_replicas: int) -> None:
        self._client = client
        self._metrics = metrics
        self.mirrors = [Mirror(replica) for replica in range(num_replicas)]
        self.lives = Lives()
        self._num_watchers = 0
        self._reasons = [""] * num_replicas  # why each engine was last started again
        self._changed = asyncio.Event()  # replaced at each change
        self._closed = False
        self._describing = [asyncio.Lock() for _ in range(num_replicas)]
        self._described: dict[tuple[int, bytes | None], tuple[float, CacheDescription]] = {}  # with the time of each

    # ── what the engines' clients call ────────────────────────────────────────────────────────────────────────────────

    def on_changes(self, changes: LiveChanges, replica: int) -> None:
        if not self._num_watchers:
            return  # it was sent before the engine heard of that
        try:
            self.mirrors[replica].apply(changes, self._metrics.totals())
            self.lives.add(changes, replica)
        except Exception as error:  # the caller reads the engine's messages: it must not end
            log.error("the live view of engine %d has failed until it is opened anew", replica, exc_info=error)
            self.mirrors[replica].clear()
        self._wake()

    def on_restart(self, reason: str, replica: int) -> None:
        self._reasons[replica] = reason
        self.mirrors[replica].clear()
        self.lives.restart(replica, time.time())
        self._wake()

    # ── watchers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def watch(self, model: str, tenant: str | None) -> AsyncIterator[bytes]:
        """The lines of a stream, until it is closed. `tenant` may see only its own; None sees everything."""
        positions = [Position() for _ in self.mirrors]
        self._num_watchers += 1
        if self._num_watchers == 1:
            self._client.watch(INTERVAL_S)
        try:
            yield hello(model, len(self.mirrors), tenant)
            while not self._closed:
                changed = self._changed
                lines = [line for index, each in enumerate(positions) for line in self._take(index, each, tenant)]
                for line in lines:
                    yield line
                if not lines and not await is_set_within(changed, PING_S):
                    yield encode_json({"type": "ping", "time_s": round(time.time(), 3)}) + b"\n"
        finally:
            self._num_watchers -= 1
            if not self._num_watchers:
                self._end_watch()

    async def describe_cache(self, replica: int, salt: bytes | None) -> CacheDescription:
        """The prefix tree, at most MAX_AGE_S old: the engine makes no step while it describes it. Callers who come
        meanwhile get the same."""
        async with self._describing[replica]:
            made_s, described = self._described.get((replica, salt), (-math.inf, None))
            if described is None or time.monotonic() - made_s > MAX_AGE_S:
                described = await self._client.describe_cache(salt, MAX_NODES, replica)
                self._described[replica, salt] = time.monotonic(), described
            return described

    def close(self) -> None:
        """End all streams."""
        self._closed = True
        self._wake()

    def _end_watch(self) -> None:
        self._client.unwatch()
        for replica, mirror in enumerate(self.mirrors):
            mirror.clear()
            self.lives.unfollow(replica)

    def _take(self, replica: int, position: Position, tenant: str | None) -> list[bytes]:
        """The lines that a watcher has not got yet, in all at most those of MAX_DELTAS messages."""
        lines, mirror, is_ready = list[bytes](), self.mirrors[replica], self._client.is_ready(replica)
        if is_ready != position.is_ready:
            position.is_ready = is_ready
            lines.append(engine_line(replica, is_ready, self._reasons[replica]))
        if mirror.is_empty:
            position.sequence = None
        elif position.sequence != mirror.sequence:
            fresh = [delta for delta in mirror.deltas if delta.sequence > (position.sequence or 0)]
            is_next = position.sequence is not None and fresh and fresh[0].sequence == position.sequence + 1
            lines += [delta.line(tenant) for delta in fresh] if is_next else [mirror.snapshot(tenant)]
            position.sequence = mirror.sequence
        return lines

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def hello(model: str, num_replicas: int, tenant: str | None) -> bytes:
    document: Document = {
        "type": "hello",
        "version": 1,
        "model": model,
        "replicas": num_replicas,
        "masked": tenant is not None,
    }
    return encode_json(document) + b"\n"


def engine_line(replica: int, is_ready: bool, reason: str) -> bytes:
    return encode_json({"type": "engine", "replica": replica, "ready": is_ready, "reason": reason}) + b"\n"


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
