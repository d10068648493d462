"""A real `quire serve` in a process of its own, for tests to talk to."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2

START_S = 120.0


class Running:
    """A server on a free port; use as a context manager."""

    def __init__(self, *options: str, model: str = "smollm2:135m") -> None:
        command = [sys.executable, "-m", "quire.cli.main", "serve", model, "--port", "0", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._address: str | None = None
        self._known = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if self._address is None and (found := re.search(r"Serving at (https?://\S+)", line)):
                self._address = found[1]
                self._known.set()
        self._known.set()

    @property
    def url(self) -> str:
        assert self._known.wait(START_S), self.lines
        assert self._address, self.lines
        return self._address

    def client(self, **options: object) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=60.0, **options)  # type: ignore[arg-type]

    def engine_pid(self) -> int:
        """The engine's process: the one child that runs quire.engine.process."""
        for child in children(self.process.pid):
            if "quire.engine.process" in Path(f"/proc/{child}/cmdline").read_text().split("\0"):
                return child
        raise LookupError("no engine")

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float = 30.0) -> int:
        return self.process.wait(timeout_s)

    def __enter__(self) -> Running:
        self.url  # noqa: B018  # wait until it is there
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.terminate()
            try:
                self.wait(15.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.wait()
        self._reader.join()
        assert self.process.stderr
        self.process.stderr.close()


def children(pid: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid:
                found.append(int(entry))
    return found


def wait_for(condition: object, timeout_s: float = 30.0) -> None:
    """Until a condition holds; time is a bound, not a measure."""
    end = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
