"""`quire pull`: fetch a model into the cache."""

from __future__ import annotations

import argparse

from quire import store
from quire.cli.options import add_model, say
from quire.progress import bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)


def run(arguments: argparse.Namespace) -> None:
    """Fetch a model. A download that was cut off goes on where it stopped."""
    name = arguments.model
    with bar(f"pulling {name}") as report:
        files = store.pull(name, lambda what, done, total: report(done, total))
    say(f"{name} is here: {files.path} ({files.size_bytes / 2**20:.1f} MiB)")
