"""Mailbox: where updates wait for the coroutine that reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from quire.core.plan import Update


class Mailbox:
    """Updates that the reader has not fetched yet are returned together.

    With a `loop`, which is the reader's, they may come from another thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop
        self._updates: list[Update] = []
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, updates: Sequence[Update]) -> None:
        self._call(self._put, updates)

    def fail(self, error: Exception) -> None:
        """Raise the error in the reader, after the updates that are here."""
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
