"""`quire top`: a server's engines in the terminal, as they run."""

from __future__ import annotations

import argparse
import shutil
import sys
import time

from quire.config import api_key
from quire.errors import InvalidParams, ServerError
from quire.top.screen import draw
from quire.top.state import ServerState
from quire.top.stream import Lost, Stream

DEFAULT_URL = "http://127.0.0.1:8000"
REDRAW_S = 0.1
TEXT_WIDTH = 160  # of a picture that is not for a terminal
FIRST_S = 10.0  # for the first picture, with --once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, metavar="URL", help="the server; default %(default)s")
    parser.add_argument("--api-key", metavar="KEY", help="its API key; $QUIRE_API_KEY if not set")
    parser.add_argument("--once", action="store_true", help="print one picture as plain text and exit")


def run(arguments: argparse.Namespace) -> None:
    """Watch the engines of a server in the terminal."""
    if not arguments.once and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidParams("quire top draws on a terminal, and this is none; --once prints one picture as text.")
    stream = Stream(arguments.url, arguments.api_key or api_key())
    try:
        if arguments.once:
            print_once(stream)
        else:
            watch(stream)
    finally:
        stream.close()


def watch(stream: Stream) -> None:
    """Redraw until q or Ctrl-C."""
    from quire.top.terminal import full_screen, read_key, show

    state = ServerState()
    try:
        with full_screen():
            while "q" not in read_key(REDRAW_S).lower():
                take(stream, state)
                width, height = shutil.get_terminal_size()
                show(draw(state, stream.url, width, height))
    except KeyboardInterrupt:
        pass


def print_once(stream: Stream) -> None:
    state, end_s = ServerState(), time.monotonic() + FIRST_S
    while not state.engines or not all(engine.facts for engine in state.engines):
        if time.monotonic() > end_s:
            raise ServerError(f"{stream.url} has sent no picture within {FIRST_S:g} seconds; try again.")
        time.sleep(REDRAW_S)
        take(stream, state)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else TEXT_WIDTH
    print("\n".join(line.rstrip() for line in draw(state, stream.url, width, 10_000, colored=False)))


def take(stream: Stream, state: ServerState) -> None:
    for line in stream.take():
        if isinstance(line, Lost):
            state.lost = line.reason
        else:
            apply(line, state, stream.url)


def apply(line: object, state: ServerState, url: str) -> None:
    try:
        state.apply(line)  # type: ignore[arg-type]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ServerError(
            f"{url} has sent a line that quire top cannot read ({type(error).__name__}); is it a server of another "
            "version?"
        ) from error
