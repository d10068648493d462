"""Clients of an engine in this process: in the caller's thread, or in a thread of its own.

Importing this module loads no torch; constructing a client does. The server's client (`supervisor.py`), whose engine is
in another process, has the same methods: submit, abort, health.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import logging
import queue
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config import EngineConfig
from quire.core.plan import Update
from quire.core.request import Finish, Request
from quire.engine.mailbox import Mailbox
from quire.engine.precompile import precompile
from quire.errors import DeviceLost, EngineClosed, EngineError, QuireError
from quire.kernels import isa

if TYPE_CHECKING:
    from quire.engine.engine import Engine, EngineInfo

Progress = Callable[[int, int], None]

log = logging.getLogger("quire.engine")


def start_engine(config: EngineConfig, path: Path, progress: Progress | None = None) -> Engine:
    """Build an engine. The CPU is probed before torch is imported: torch must not use instructions that do not work.

    Torch's half a million objects are frozen, so that garbage collection does not scan them during a step.
    """
    isa.prepare()
    precompilation = precompile(config, path)
    try:
        is_first = "torch" not in sys.modules
        from quire.engine.build import build_engine

        if is_first:
            gc.freeze()
            atexit.register(gc.unfreeze)
        return build_engine(config, path, progress, precompilation)
    except BaseException:
        precompilation.cancel()
        raise


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


class AsyncClient:
    """The engine in a thread of its own, for asyncio."""

    def __init__(self, config: EngineConfig, path: Path) -> None:
        engine = start_engine(config, path)
        self.info: EngineInfo = engine.info
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._work_lock = threading.Lock()  # no work is queued after the thread has ended
        self._mailboxes: dict[str, Mailbox] = {}  # used by the thread only
        self._ended: QuireError | None = None  # why the thread takes no more work
        self._engine = engine
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._thread.start()

    async def submit(self, requests: Sequence[Request]) -> AsyncIterator[list[Update]]:
        """Run requests together: all are added, or all refused. Yields their updates until all have finished."""
        mailbox = Mailbox(asyncio.get_running_loop())
        with self._work_lock:
            if self._ended is not None:
                raise self._ended
            self._work.put(lambda: self._accept(requests, mailbox))
        unfinished_ids = {request.id for request in requests}
        try:
            while unfinished_ids:
                updates = await mailbox.get()
                unfinished_ids -= {update.id for update in updates if update.finish}
                yield updates
        finally:
            if unfinished_ids:
                self._work.put(lambda: self._leave(unfinished_ids, mailbox))

    def abort(self, request_id: str) -> None:
        self._work.put(lambda: self._cancel(request_id))

    def health(self) -> bool:
        return self._ended is None

    def close(self) -> None:
        """Stop after the current step. Unfinished requests raise EngineClosed."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        reason: QuireError = EngineClosed("This engine has been closed; make a new one.")
        try:
            self._serve(self._engine)
        except DeviceLost as error:
            reason = error
        except Exception as error:
            log.error("the engine's thread failed", exc_info=error)
            reason = EngineError(f"The engine failed: {error}")
        with self._work_lock:
            self._ended = reason
        while not self._work.empty():
            if (work := self._work.get()) is not None:
                work()  # fails with `reason`
        for mailbox in set(self._mailboxes.values()):
            mailbox.fail(reason)

    def _serve(self, engine: Engine) -> None:
        can_prepare = True
        while self._take_work(wait=not engine.has_work and not can_prepare):
            if engine.has_work:
                self._deliver(engine.step())
            can_prepare = engine.has_work or engine.idle()

    def _take_work(self, *, wait: bool) -> bool:
        """Run the queued work. Returns False if the client is closed."""
        while True:
            try:
                work = self._work.get(block=wait)
            except queue.Empty:
                return True
            if work is None:
                return False
            work()
            wait = False

    def _accept(self, requests: Sequence[Request], mailbox: Mailbox) -> None:
        if self._ended is not None:
            mailbox.fail(self._ended)
            return
        added: list[Request] = []
        try:
            for request in requests:
                self._engine.add(request)
                added.append(request)
                self._mailboxes[request.id] = mailbox
        except Exception as error:
            for request in added:
                self._engine.abort(request.id)
                del self._mailboxes[request.id]
            mailbox.fail(error)

    def _leave(self, request_ids: Iterable[str], mailbox: Mailbox) -> None:
        """Abort requests whose mailbox is no longer read, but not those of another mailbox with the same ids."""
        for request_id in request_ids:
            if self._ended is None and self._mailboxes.get(request_id) is mailbox:
                del self._mailboxes[request_id]
                self._engine.abort(request_id)

    def _cancel(self, request_id: str) -> None:
        if self._ended is None and (update := self._engine.abort(request_id)):
            self._deliver([update])

    def _deliver(self, updates: Sequence[Update]) -> None:
        bundles: dict[Mailbox, list[Update]] = {}
        for update in updates:
            mailbox = self._mailboxes.pop(update.id) if update.finish else self._mailboxes[update.id]
            bundles.setdefault(mailbox, []).append(update)
        for mailbox, bundle in bundles.items():
            mailbox.put(bundle)
