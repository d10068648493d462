"""How everything above reaches an engine: in this thread, or in one of its own.

Importing this loads no torch; making a client does. The server's client, with the engine in another process, has the
same three verbs: submit, abort, health.
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
    """Build an engine. The CPU is probed first: torch must not find instructions that only seem to be there.

    Torch's own objects, half a million, are set aside from garbage collection, which would hold up a step for as long
    as it takes to look through them.
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
    """While torch is imported and a vocabulary is read: looking through objects that all stay takes 0.2 s of 2 s."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class InProcess:
    """The engine in the thread of its one caller: it moves when `step` is called."""

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


Inbox = deque[Update]  # what a caller has not taken yet


class Shared:
    """The engine in its callers' threads: it moves when one of them waits for updates.

    Each caller has an inbox. A caller that finds its own empty runs a step, and puts everybody's updates into their
    inboxes. So several callers share one engine, by turns in one thread or from several threads.
    """

    def __init__(self, config: EngineConfig, path: Path, progress: Progress | None = None) -> None:
        self._client = InProcess(config, path, progress)
        self.info = self._client.info
        self._lock = threading.Lock()  # around all that is done with the engine
        self._inboxes: dict[str, Inbox] = {}  # of the requests that have not ended
        self._aborts: deque[str] = deque()  # requests that the next holder of the lock aborts

    @property
    def engine(self) -> Engine:
        return self._client.engine

    def submit(self, request: Request, inbox: Inbox) -> None:
        """Have a request computed; its updates come to the inbox."""
        with self._lock:
            self._client.add(request)
            self._inboxes[request.id] = inbox

    def receive(self, inbox: Inbox) -> list[Update]:
        """What has arrived, after a step if nothing has. The step may bring nothing either."""
        with self._lock:
            self._abort_due()
            if not inbox:
                self._step()
            self._abort_due()
            updates = list(inbox)
            inbox.clear()
        return updates

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; no more updates of them arrive.

        The garbage collector may call this in the middle of a step, to close a generator: the caller that runs the
        step aborts them then.
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
                inbox = self._inboxes.pop(update.id, None) if update.finish else self._inboxes.get(update.id)
                if inbox is not None:
                    inbox.append(update)
        except Exception:
            raise
        except BaseException:
            self._end_all()
            raise

    def _end_all(self) -> None:
        """After Ctrl-C in a step: some of its updates are lost, so no answer can go on."""
        inboxes, self._inboxes = self._inboxes, {}
        for request_id, inbox in inboxes.items():
            self._client.abort(request_id)
            inbox.append(Update(request_id, [], Finish.ABORT))

    def _abort_due(self) -> None:
        while self._aborts:
            request_id = self._aborts.popleft()
            if self._inboxes.pop(request_id, None) is not None and self.health():
                self._client.abort(request_id)


class Threaded:
    """The engine in a thread of its own, for asyncio."""

    def __init__(self, config: EngineConfig, path: Path, progress: Progress | None = None) -> None:
        engine = start_engine(config, path, progress)
        self.info: EngineInfo = engine.info
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._work_lock = threading.Lock()  # work is put into the queue only as long as somebody takes it out
        self._mailboxes: dict[str, Mailbox] = {}  # belongs to the thread
        self._ended: QuireError | None = None  # why the thread takes no more work
        self._engine = engine
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._thread.start()

    async def submit(self, requests: Sequence[Request]) -> AsyncIterator[list[Update]]:
        """Run requests that belong together; yields their updates as steps produce them, until all have ended."""
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
        """Stop after the step that runs now. Requests still open end with EngineClosed."""
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
                work()  # which is refused
        for mailbox in set(self._mailboxes.values()):
            mailbox.fail(reason)

    def _serve(self, engine: Engine) -> None:
        can_prepare = True
        while self._take_work(wait=not engine.has_work and not can_prepare):
            if engine.has_work:
                self._deliver(engine.step())
            can_prepare = engine.has_work or engine.idle()

    def _take_work(self, *, wait: bool) -> bool:
        """Do what callers have asked for; False when they asked to stop."""
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
        """Nobody reads this mailbox any more. A request that was refused for its id leaves the other one alone."""
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
