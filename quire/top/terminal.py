"""full_screen: the terminal as `quire top` uses it: its other screen, no cursor, keys without Enter."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

ENTER = "\x1b[?1049h\x1b[?25l"
LEAVE = "\x1b[?25h\x1b[?1049l"
HOME, END_LINE, END_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


@contextmanager
def full_screen() -> Iterator[None]:
    """Standard input and output are a terminal."""
    before = termios.tcgetattr(sys.stdin.fileno())
    old_handler = signal.signal(signal.SIGTERM, leave)
    tty.setcbreak(sys.stdin.fileno())
    write(ENTER)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, before)
        write(LEAVE)
        signal.signal(signal.SIGTERM, old_handler)


def leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def show(lines: Sequence[str]) -> None:
    write(HOME + f"{END_LINE}\r\n".join(lines) + END_LINE + END_SCREEN)


def read_key(seconds: float) -> str:
    """The key that is pressed within that time, or an empty string."""
    if not select.select([sys.stdin], [], [], seconds)[0]:
        return ""
    return os.read(sys.stdin.fileno(), 1024).decode(errors="replace") or "q"  # the terminal has been closed


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
