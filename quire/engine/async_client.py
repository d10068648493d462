"""AsyncClient: an engine in a thread of its own, for asyncio. It has the methods of the other clients (`client.py`)."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config import EngineConfig
from quire.core.plan import Update
from quire.core.request import Request
from quire.engine.client import start_engine
from quire.engine.mailbox import Mailbox
from quire.errors import DeviceLost, EngineClosed, EngineError, QuireError

if TYPE_CHECKING:
    from quire.engine.engine import Engine, EngineInfo

log = logging.getLogger("quire.engine")


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
