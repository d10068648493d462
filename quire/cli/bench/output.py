"""What every `quire bench` does with its result: a table, one JSON document, or a page with charts."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quire import __version__
from quire.cli.errors import say
from quire.cli.options import add_json
from quire.errors import InvalidParams

SECRET = "--api-key"


def add_output(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with charts, for any browser")


def check_html(path: Path | None) -> None:
    """Raise InvalidParams before anything is measured, rather than after."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        raise InvalidParams(f"--html {path} cannot be written: give a file in a directory that exists.")


def stamp(bench: str, document: dict[str, Any]) -> dict[str, Any]:
    """The document with what was measured, when, and by which command."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"bench": bench, "quire": __version__, "time": now, "command": command_line(sys.argv[1:]), **document}


def command_line(arguments: Sequence[str]) -> str:
    """The command without its API key."""
    shown, is_secret = ["quire"], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        shown.append("..." if is_secret else f"{name}=..." if equals and name == SECRET else argument)
        is_secret = argument == SECRET
    return shlex.join(shown)


def finish(
    bench: str,
    document: dict[str, Any],
    arguments: argparse.Namespace,
    show: Callable[[dict[str, Any]], None],
    *,
    without: Sequence[str] = (),
) -> None:
    """Print the document or a table, and write the page. `without` are entries that only the page needs."""
    stamped = stamp(bench, document)
    if arguments.json:
        print(json.dumps({name: value for name, value in stamped.items() if name not in without}))
    else:
        show(document)
    if arguments.html is not None:  # last: if it cannot be written, the result has been printed
        write_page(arguments.html, stamped)


def write_page(path: Path, document: dict[str, Any]) -> None:
    from quire.bench.report.build import build
    from quire.bench.report.page import render
    from quire.bench.report.result import Result

    save_page(path, render(build([Result(document["model"], document)])))


def save_page(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InvalidParams(f"--html {path} cannot be written: {error.strerror}.") from None
    say(f"Wrote {path} ({len(page.encode()) / 1000:,.0f} kB)")
