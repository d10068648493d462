"""`quire pull`: fetch a model into the cache."""

from __future__ import annotations

from typing import Annotated

import typer

from quire.cli.options import say
from quire.config import DEFAULT_MODEL
from quire.progress import bar
from quire.weights import store


def pull(
    name: Annotated[str, typer.Argument(help="An alias (see `quire models`) or a hub name.")] = DEFAULT_MODEL,
) -> None:
    """Fetch a model. A download that was cut off goes on where it stopped."""
    with bar(f"pulling {name}") as report:
        files = store.pull(name, lambda what, done, total: report(done, total))
    say(f"{name} is here: {files.path} ({files.size_bytes / 2**20:.1f} MiB)")
