"""The engines behind a server: one in a process of its own, or several replicas. `main.py` and batch jobs call this."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Protocol

from quire.config import EngineConfig
from quire.core.plan import Update
from quire.core.request import Request
from quire.engine.fleet import Fleet, FleetCallbacks
from quire.engine.messages import Ready, StepOutputs
from quire.engine.supervisor import EngineCallbacks, Supervised


class EngineClient(Protocol):
    """What runs requests: `Supervised`, one engine, or `Fleet`, several."""

    async def start(self) -> Ready: ...

    def submit(self, requests: Sequence[Request]) -> AsyncIterator[list[Update]]: ...

    def abort(self, request_id: str) -> None: ...

    def health(self) -> bool: ...

    @property
    def gone(self) -> bool: ...

    async def close(self) -> None: ...


def make_client(
    engine: EngineConfig,
    path: Path,
    num_replicas: int,
    stall_s: float,
    on_step: Callable[[StepOutputs, int], None],
    on_restart: Callable[[int], None],
) -> EngineClient:
    """A client that is not started. The callbacks get the number of the replica."""
    if num_replicas > 1:
        fleet = FleetCallbacks(on_step, lambda reason, replica: on_restart(replica))
        return Fleet(engine, path, num_replicas, stall_s=stall_s, callbacks=fleet)
    one = EngineCallbacks(on_step=lambda outputs: on_step(outputs, 0), on_restart=lambda reason: on_restart(0))
    return Supervised(engine, path, stall_s=stall_s, callbacks=one)
