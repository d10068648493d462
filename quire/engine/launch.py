"""How an engine's process is started, and where: `supervisor.py` starts one after another by a `Launch`.

`LocalLaunch` starts a process on this machine. `distributed/ray_engines.py` has one that lets Ray choose the machine.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

ENGINE = ("-m", "quire.engine.process")


class EngineProcess(Protocol):
    """A process that was started. `asyncio.subprocess.Process` is one."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None:
        """The exit status, or a negative signal number. None while it runs."""
        ...

    async def wait(self) -> int: ...

    def kill(self) -> None:
        """Raises ProcessLookupError if it has ended."""
        ...


@dataclass(frozen=True, slots=True)
class LaunchedEngine:
    """An engine's process and the connection to it."""

    process: EngineProcess
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Launch(Protocol):
    async def launch(self) -> LaunchedEngine:
        """Start a process. Raises OSError if there is none."""
        ...

    async def close(self) -> None:
        """No other process will be started."""
        ...


@dataclass(frozen=True, slots=True)
class LocalLaunch:
    """A process on this machine. `environment`: its variables; None: those of this process."""

    environment: Mapping[str, str] | None = None

    async def launch(self) -> LaunchedEngine:
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours)
            try:  # the process comes last: a caller that is cancelled while it waits leaves none behind
                process = await asyncio.create_subprocess_exec(
                    sys.executable, *ENGINE, str(theirs.fileno()), pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL, start_new_session=True, env=self.environment,
                )  # fmt: skip
            except BaseException:
                writer.close()
                raise
        return LaunchedEngine(process, reader, writer)

    async def close(self) -> None:
        pass


def describe_exit(code: int) -> str:
    """A return code in words. Real-time signals have no names."""
    if code >= 0:
        return f"exit status {code}"
    names = {int(each): each.name for each in signal.Signals}
    return f"signal {names.get(-code, -code)}"
