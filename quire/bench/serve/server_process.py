"""A server that lives as long as a measurement: started, waited for, stopped. Knows nothing of what it serves."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from quire.bench.serve.client import OK, fetch
from quire.bench.serve.http_client import Pool, Target
from quire.errors import EngineError

START_S = 600.0  # a model may have to be fetched first
STOP_S = 30.0
POLL_S = 0.1
ADDRESS = re.compile(r"https?://[^\s/]+:\d+")
NUM_LAST_LINES = 20


class Server:
    """A server's process. `url` is known once it has printed a line with its address on stderr."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read())

    @property
    def exit_status(self) -> int | None:
        """None while it runs."""
        return self._process.returncode

    @property
    def last_words(self) -> str:
        return "\n".join(self._lines)

    async def url(self) -> str:
        """Its address, once it can take work."""
        address = await self._address
        pool = Pool(Target.of(address))
        try:
            while not await is_ready(pool):
                if self.exit_status is not None:
                    raise self._died()
                await asyncio.sleep(POLL_S)
        finally:
            pool.close()
        return address

    async def stop(self) -> None:
        """Ask it to end, and see to it that it does."""
        if self.exit_status is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), STOP_S)
            except TimeoutError:
                os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await self._reading

    async def _read(self) -> None:
        """All of stderr: a pipe that nobody reads would stop the server. Lines are kept for when it fails."""
        assert self._process.stderr is not None
        rest = ""
        while data := await self._process.stderr.read(1 << 16):
            *lines, rest = (rest + data.decode("utf-8", "replace")).split("\n")
            for line in lines:
                self._take(line)
        self._take(rest)
        await self._process.wait()
        if not self._address.done():
            self._address.set_exception(self._died())

    def _take(self, line: str) -> None:
        if line.strip():
            self._lines.append(line.rstrip())
        if not self._address.done() and (found := ADDRESS.search(line)):
            self._address.set_result(found.group())

    def _died(self) -> EngineError:
        return EngineError(f"The server ended with status {self.exit_status} before it could work:\n{self.last_words}")


async def is_ready(pool: Pool) -> bool:
    """Whether a server that is starting takes work already."""
    try:
        status, _ = await fetch(pool, "/ready")
    except EngineError:
        return False
    return status == OK


@asynccontextmanager
async def spawn(command: Sequence[str]) -> AsyncIterator[tuple[Server, str]]:
    """Start a server; yields it with its address when it is ready, and stops it afterwards.

    It has a session of its own: Ctrl-C is for the measurement, which stops the server when it has reported.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    server = Server(process)
    try:
        try:
            async with asyncio.timeout(START_S):
                url = await server.url()
        except TimeoutError:
            raise EngineError(f"The server was not ready within {START_S:g} s:\n{server.last_words}") from None
        yield server, url
    finally:
        await server.stop()
