"""TraceWriter: writes a recording in a thread of its own. It never disturbs whom it records.

`write` neither waits nor raises. Each half second what has come is compressed and written, so that a process that is
killed loses no more than that. If the file cannot be written, or takes less than comes, the recording ends with a line
in the log, and its beginning is kept.
"""

from __future__ import annotations

import logging
import os
import threading
import zlib
from pathlib import Path

from quire.errors import InvalidParams
from quire.trace.format import Line, encode

FLUSH_S = 0.5
CLOSE_S = 20.0
MAX_PENDING_BYTES = 64 << 20
GZIP = 31  # window bits of zlib for a gzip file
LEVEL = 1  # a higher level costs several times as much for a tenth of the size

log = logging.getLogger("quire.trace")


class TraceWriter:
    """One file, which must not exist. Only its owner can read it: it holds prompts."""

    def __init__(self, path: Path, flush_s: float = FLUSH_S) -> None:
        self.path = path
        self.failed = False
        self._flush_s = flush_s
        self._pending: list[bytes] = []
        self._num_pending_bytes = 0
        self._changed = threading.Condition()
        self._closing = False
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise InvalidParams(
                f"{path} exists; a recording needs a new file. Name another one, or remove it."
            ) from None
        except OSError as error:
            raise InvalidParams(f"{path} cannot be written: {error.strerror}. Name another file.") from None
        self._thread = threading.Thread(target=self._run, name="quire-trace", daemon=True)
        self._thread.start()

    def write(self, lines: bytes) -> None:
        """Whole lines."""
        if not lines or self.failed:
            return
        with self._changed:
            self._pending.append(lines)
            self._num_pending_bytes += len(lines)
            too_many = self._num_pending_bytes > MAX_PENDING_BYTES
        if too_many:
            self._fail(f"{MAX_PENDING_BYTES:,} bytes wait for the disk, which is too slow")

    def add(self, line: Line) -> None:
        self.write(encode(line))

    def close(self) -> None:
        """Write what is left."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._fail(f"the disk has not taken the rest within {CLOSE_S:g} s")

    def _run(self) -> None:
        compressor = zlib.compressobj(LEVEL, zlib.DEFLATED, GZIP)
        try:
            while not self._wait():
                self._flush(compressor, zlib.Z_SYNC_FLUSH)
            self._flush(compressor, zlib.Z_FINISH)
        except OSError as error:
            self._fail(f"it cannot be written: {error.strerror}")
        finally:
            os.close(self._file)

    def _wait(self) -> bool:
        """Wait until it is time to write. Returns whether this is the last time."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing, self._flush_s)
            return self._closing

    def _flush(self, compressor: zlib._Compress, mode: int) -> None:
        with self._changed:
            pending, self._pending, self._num_pending_bytes = self._pending, [], 0
        if (not pending and mode != zlib.Z_FINISH) or self.failed:
            return
        data = b"".join(map(compressor.compress, pending)) + compressor.flush(mode)
        while data:
            data = data[os.write(self._file, data) :]

    def _fail(self, reason: str) -> None:
        with self._changed:
            if self.failed:
                return
            self.failed = True
            self._pending, self._num_pending_bytes = [], 0
        log.error(
            "recording into %s has stopped: %s. Serving goes on; the recording's beginning is kept", self.path, reason
        )
