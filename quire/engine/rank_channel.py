"""The messages between rank 0 and another rank while they start: one JSON document a line, over a socket.

Steps are not sent here: they are commands in shared memory (`kernels/cpu/ranks.py`). When one side closes the socket,
the other one ends.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RankStart:
    """The first message to a rank."""

    config: dict[str, Any]  # of the engine
    path: str
    rank: int
    size: int
    isa: str
    threads: int
    crowded: bool
    equal_threads: bool
    cores: list[int] | None  # to which it is pinned
    kv_dtype: str
    quantize: str | None


@dataclass(frozen=True, slots=True)
class RankLoaded:
    """A rank has loaded its weights. `groups` has each layer's group of the cache."""

    weight_bytes: int
    block_bytes: int
    groups: list[int]


@dataclass(frozen=True, slots=True)
class RankBuild:
    """The cache that a rank allocates, and the largest step that it records."""

    num_blocks: int
    num_host_blocks: int
    step_tokens: int


@dataclass(frozen=True, slots=True)
class RankReady:
    """A rank has recorded its steps."""


@dataclass(frozen=True, slots=True)
class RankGo:
    """Commands follow. Rank 0 has allocated that many bytes of shared pages."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class RankFailed:
    """A rank could not be built."""

    error: str
    message: str


RankMessage = RankStart | RankLoaded | RankBuild | RankReady | RankGo | RankFailed
KINDS = {kind.__name__: kind for kind in (RankStart, RankLoaded, RankBuild, RankReady, RankGo, RankFailed)}


class RankChannel:
    """One end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lines = sock.makefile("r", encoding="utf-8")

    def send(self, message: RankMessage) -> None:
        """A message to a rank that has ended is dropped: its end is noticed where messages are read."""
        line = json.dumps([type(message).__name__, asdict(message)]) + "\n"
        with suppress(BrokenPipeError, ConnectionError):
            self._socket.sendall(line.encode())

    def messages(self) -> Iterator[RankMessage]:
        """Until the other side closes."""
        with suppress(ConnectionError):
            for line in self._lines:
                kind, values = json.loads(line)
                yield KINDS[kind](**values)

    def end(self) -> None:
        """Both sides read the end."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._lines.close()
        self._socket.close()
