"""A server as a child process, for `quire bench serve --spawn`: any command that prints its address on stderr."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from quire.bench.serve.client import OK, fetch
from quire.bench.serve.http_client import ConnectionPool, Target
from quire.errors import EngineError

START_S = 600.0  # includes the download of a model
STOP_S = 30.0
POLL_S = 0.1
ADDRESS = re.compile(r"https?://[^\s/]+:\d+")
NUM_LAST_LINES = 20


class ServerProcess:
    """The process of a server. Its URL is known after it has printed a line with its address on stderr."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read())

    @property
    def exit_status(self) -> int | None:
        """None while the process runs."""
        return self._process.returncode

    @property
    def last_lines(self) -> str:
        return "\n".join(self._lines)

    async def url(self) -> str:
        """The address, after /ready succeeds."""
        address = await self._address
        pool = ConnectionPool(Target.of(address))
        try:
            while not await is_ready(pool):
                if self.exit_status is not None:
                    raise self._died()
                await asyncio.sleep(POLL_S)
        finally:
            pool.close()
        return address

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL if that is not enough."""
        if self.exit_status is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), STOP_S)
            except TimeoutError:
                os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await self._reading

    async def _read(self) -> None:
        """Read all of stderr: a full pipe would block the server. The last lines are kept for error messages."""
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
        return EngineError(f"The server ended with status {self.exit_status} before it could work:\n{self.last_lines}")


async def is_ready(pool: ConnectionPool) -> bool:
    """True if the server accepts requests."""
    try:
        status, _ = await fetch(pool, "/ready")
    except EngineError:
        return False
    return status == OK


@asynccontextmanager
async def spawn(command: Sequence[str]) -> AsyncIterator[tuple[ServerProcess, str]]:
    """Start a server, yield it with its address when it is ready, and stop it afterwards.

    The server has its own session, so Ctrl-C does not reach it. It is stopped after the report.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    server = ServerProcess(process)
    try:
        try:
            async with asyncio.timeout(START_S):
                url = await server.url()
        except TimeoutError:
            raise EngineError(f"The server was not ready within {START_S:g} s:\n{server.last_lines}") from None
        yield server, url
    finally:
        await server.stop()
