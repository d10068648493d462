"""ServerRecording: the recording of a server, `quire serve --trace FILE`. The engines make its lines."""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime
from pathlib import Path

from quire import __version__
from quire.engine.messages import StepOutputs
from quire.store.digest import digest_of
from quire.trace.format import FORMAT, VERSION, Close, Header, RecordingStart, Restart
from quire.trace.writer import TraceWriter


class ServerRecording:
    """Made before the model is loaded: a file that cannot be written is refused at once."""

    def __init__(self, path: Path, *, anonymous: bool) -> None:
        self._writer = TraceWriter(path)
        self.start = RecordingStart(begin_s=time.monotonic(), key=secrets.token_bytes(32), anonymous=anonymous)

    def begin(self, model: str, path: Path, num_replicas: int) -> None:
        """Write the first line. Reads the model's files."""
        self._writer.add(
            Header(
                format=FORMAT,
                version=VERSION,
                quire=__version__,
                started=datetime.now(UTC).isoformat(timespec="seconds"),
                model=model.rstrip("/").rpartition("/")[2] if self.start.anonymous else model,
                digest=digest_of(path),
                anonymous=self.start.anonymous,
                replicas=num_replicas,
            )
        )

    def on_step(self, outputs: StepOutputs) -> None:
        self._writer.write(outputs.recorded)

    def on_restart(self, reason: str, replica: int) -> None:
        self._writer.add(Restart(replica=replica, at=self._at(), reason=reason))

    def close(self, *, has_served: bool) -> None:
        """Without a model there is nothing to keep: the same command must not find the file in its way."""
        self._writer.add(Close(at=self._at()))
        self._writer.close()
        if not has_served:
            self._writer.path.unlink(missing_ok=True)

    def _at(self) -> float:
        return round(time.monotonic() - self.start.begin_s, 6)
