"""Clients of an engine in this process, in the thread of one caller or of several.

Importing this module loads neither numpy nor torch. Constructing a client loads numpy, and torch if the engine needs
it. The clients for asyncio (`async_client.py`) and of the server (`supervisor.py`), whose engine is in another process,
have the same methods: submit, abort, health.
"""

from __future__ import annotations

import atexit
import gc
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config import EngineConfig
from quire.core.plan import Update
from quire.core.request import Finish, Request
from quire.errors import EngineClosed
from quire.kernels import isa
from quire.kernels.cuda_driver import find_capability

if TYPE_CHECKING:
    from quire.engine.engine import Engine, EngineInfo
    from quire.engine.precompile import Precompilation

Progress = Callable[[int, int], None]

log = logging.getLogger("quire.engine")


def start_engine(config: EngineConfig, path: Path, progress: Progress | None = None) -> Engine:
    """Build an engine. The CPU is probed before torch is imported: torch must not use instructions that do not work.

    Objects of modules (half a million with torch) are frozen, so that garbage collection does not scan them in a step.
    """
    isa.prepare()
    precompilation = start_precompilation(config, path)
    try:
        is_first = "quire.engine.build" not in sys.modules
        from quire.engine.build import build_engine

        if is_first:
            gc.freeze()
            atexit.register(gc.unfreeze)
        return build_engine(config, path, progress, precompilation)
    except BaseException:
        if precompilation is not None:
            precompilation.cancel()
        raise


def start_precompilation(config: EngineConfig, path: Path) -> Precompilation | None:
    if config.device == "cpu" or find_capability() is None:
        return None
    from quire.engine.precompile import precompile

    return precompile(config, path)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """For importing torch and reading a vocabulary: scanning objects that all stay alive takes 0.2 s of 2 s."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class InProcess:
    """The engine in the thread of its one caller, which calls `step`."""

    def __init__(self, config: EngineConfig, path: Path, progress: Progress | None = None) -> None:
        self._engine: Engine | None = start_engine(config, path, progress)
        self.info: EngineInfo = self._engine.info

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise EngineClosed("This engine has been closed; make a new one.")
        return self._engine

    def add(self, request: Request) -> None:
        self.engine.add(request)

    def step(self) -> list[Update]:
        return self.engine.step()

    def abort(self, request_id: str) -> Update | None:
        return self.engine.abort(request_id)

    def health(self) -> bool:
        return self._engine is not None

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None


UpdateQueue = deque[Update]  # that a caller has not received yet


class SyncClient:
    """The engine in its callers' threads. Several callers share it, in one thread or in several.

    Each caller has a queue. A caller whose queue is empty runs a step and appends each update to its caller's queue.
    """

    def __init__(self, config: EngineConfig, path: Path, progress: Progress | None = None) -> None:
        self._client = InProcess(config, path, progress)
        self.info = self._client.info
        self._lock = threading.Lock()  # held while the engine is used
        self._queues: dict[str, UpdateQueue] = {}  # of unfinished requests
        self._aborts: deque[str] = deque()  # requests that the next holder of the lock aborts

    @property
    def engine(self) -> Engine:
        return self._client.engine

    def submit(self, request: Request, updates: UpdateQueue) -> None:
        """Add a request. Its updates are appended to `updates`."""
        with self._lock:
            self._client.add(request)
            self._queues[request.id] = updates

    def receive(self, updates: UpdateQueue) -> list[Update]:
        """Empty the queue. If it is empty, a step is run first, which may bring no updates either."""
        with self._lock:
            self._abort_due()
            if not updates:
                self._step()
            self._abort_due()
            received = list(updates)
            updates.clear()
        return received

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests. No more updates of them arrive.

        The garbage collector may call this during a step, when it closes a generator. Then the caller that runs the
        step aborts them.
        """
        self._aborts.extend(request_ids)
        if self._lock.acquire(blocking=False):
            try:
                self._abort_due()
            finally:
                self._lock.release()

    def health(self) -> bool:
        return self._client.health()

    def close(self) -> None:
        with self._lock:
            self._client.close()

    def _step(self) -> None:
        try:
            for update in self._client.step():
                updates = self._queues.pop(update.id, None) if update.finish else self._queues.get(update.id)
                if updates is not None:
                    updates.append(update)
        except Exception:
            raise
        except BaseException:
            self._end_all()
            raise

    def _end_all(self) -> None:
        """After Ctrl-C in a step some of its updates are lost, so no answer can continue."""
        queues, self._queues = self._queues, {}
        for request_id, updates in queues.items():
            self._client.abort(request_id)
            updates.append(Update(request_id, [], Finish.ABORT))

    def _abort_due(self) -> None:
        while self._aborts:
            request_id = self._aborts.popleft()
            if self._queues.pop(request_id, None) is not None and self.health():
                self._client.abort(request_id)
