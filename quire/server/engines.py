"""The engines behind a server: one in a process of its own, or several replicas. `main.py` and batch jobs call this."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from quire.config import EngineConfig
from quire.core.plan import Update
from quire.core.request import Request
from quire.engine.fleet import Fleet, FleetCallbacks
from quire.engine.live_changes import CacheDescription
from quire.engine.messages import Ready
from quire.engine.supervisor import Supervised
from quire.trace.format import RecordingStart

if TYPE_CHECKING:
    from quire.capacity.profile import CapacityProfile


class EngineClient(Protocol):
    """What runs requests: `Supervised`, one engine, or `Fleet`, several."""

    async def start(self) -> Ready: ...

    def submit(self, requests: Sequence[Request]) -> AsyncIterator[list[Update]]: ...

    def abort(self, request_id: str) -> None: ...

    def watch(self, interval_s: float) -> None: ...

    def unwatch(self) -> None: ...

    async def describe_cache(self, salt: bytes | None, max_nodes: int, replica: int = 0) -> CacheDescription: ...

    def is_ready(self, replica: int) -> bool: ...

    def health(self) -> bool: ...

    @property
    def gone(self) -> bool: ...

    @property
    def capacity_profile(self) -> CapacityProfile | None: ...

    async def close(self) -> None: ...


def make_client(
    engine: EngineConfig,
    path: Path,
    num_replicas: int,
    stall_s: float,
    callbacks: FleetCallbacks,
    recording: RecordingStart | None = None,
) -> EngineClient:
    """A client that is not started."""
    if num_replicas > 1:
        return Fleet(engine, path, num_replicas, stall_s=stall_s, callbacks=callbacks, recording=recording)
    return Supervised(engine, path, stall_s=stall_s, callbacks=callbacks.of_replica(0), recording=recording)
