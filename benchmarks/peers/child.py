"""Runs and times a child process: its output, the time of its first byte, its memory and its failure.

The calling process must be small: Linux includes the caller's resident size in the child's peak.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from peers.workload import one_line

SAMPLE_S = 0.5


@dataclass(frozen=True, slots=True)
class Child:
    """The result of a process. `stdout` and the peak include what came before a failure."""

    stdout: str
    first_s: float | None  # from the start of the process to the first byte on stdout
    total_s: float
    peak_mib: float  # the largest resident size among its processes
    failure: str | None


def run_child(command: Sequence[str], *, env: Mapping[str, str], timeout_s: float, cwd: Path | None = None) -> Child:
    """Run a command until it ends or reaches the time limit. Processes that are left in its group are killed."""
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=dict(env), cwd=cwd,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return Child("", None, 0.0, 0.0, f"could not start: {error.strerror or error}")
        try:
            stdout, first_s, group_mib, timed_out = drain(process, begin, timeout_s)
            timed_out = not has_ended(process.pid, begin + timeout_s) or timed_out
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            assert process.stdout
            process.stdout.close()
        how = f"no end within {timeout_s:g} s" if timed_out else describe_exit(process.returncode)
        failure = None if how is None else one_line(": ".join(filter(None, [how, last_line(errors)])))
        peak_mib = max(usage.ru_maxrss / 1024, group_mib)
        return Child(stdout, first_s, time.perf_counter() - begin, peak_mib, failure)


def drain(process: subprocess.Popen[bytes], begin: float, timeout_s: float) -> tuple[str, float | None, float, bool]:
    """Read stdout until it closes: its text, seconds to its first byte, the group's peak, whether it timed out."""
    assert process.stdout
    descriptor = process.stdout.fileno()
    chunks: list[bytes] = []
    first_s, group_mib, timed_out = None, 0.0, True
    while (left_s := begin + timeout_s - time.perf_counter()) > 0:
        if not select.select([descriptor], [], [], min(left_s, SAMPLE_S))[0]:
            group_mib = max(group_mib, largest_mib(process.pid))
            continue
        chunk = os.read(descriptor, 1 << 16)
        if first_s is None and chunk:
            first_s = time.perf_counter() - begin
        if not chunk:
            timed_out = False
            break
        chunks.append(chunk)
    return b"".join(chunks).decode(errors="replace"), first_s, group_mib, timed_out


def largest_mib(group: int) -> float:
    """The largest peak so far among the processes of a group. wait4 misses processes without a waiting parent."""
    peaks = [0.0]
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # the process has ended
            if os.getpgid(int(folder.name)) == group:
                lines = (folder / "status").read_text().splitlines()
                peaks += [int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")]
    return max(peaks)


def has_ended(pid: int, deadline: float) -> bool:
    """Whether a process ends before a deadline. It is not reaped."""
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.perf_counter() > deadline:
            return False
        time.sleep(0.002)
    return True


def describe_exit(status: int) -> str | None:
    if status == 0:
        return None
    if status > 0:
        return f"exit status {status}"
    try:
        return f"died with {signal.Signals(-status).name}"
    except ValueError:
        return f"died with signal {-status}"


def last_line(errors: IO[bytes]) -> str:
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - 8192))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
