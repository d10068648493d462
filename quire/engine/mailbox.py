"""Mailbox: a queue of updates, read by one coroutine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from quire.core.plan import Update


class Mailbox:
    """`get` returns all updates since the last call.

    `loop` is the reader's event loop. With it, `put` and `fail` may be called from another thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop
        self._updates: list[Update] = []
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, updates: Sequence[Update]) -> None:
        self._call(self._put, updates)

    def fail(self, error: Exception) -> None:
        """Raise the error in the reader, after it has read the updates that were put before."""
        self._call(self._fail, error)

    async def get(self) -> list[Update]:
        if not self._updates and self._error is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if not self._updates and self._error is not None:
            raise self._error
        updates, self._updates = self._updates, []
        return updates

    def _call(self, function: Callable[[Any], None], argument: object) -> None:
        if self._loop is None:
            function(argument)
            return
        with suppress(RuntimeError):  # the reader's loop is closed
            self._loop.call_soon_threadsafe(function, argument)

    def _put(self, updates: Sequence[Update]) -> None:
        self._updates.extend(updates)
        self._wake()

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
