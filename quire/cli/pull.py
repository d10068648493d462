"""`quire pull`: download a model."""

from __future__ import annotations

import argparse

from quire import store
from quire.cli.errors import say
from quire.cli.options import add_model
from quire.progress import bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)


def run(arguments: argparse.Namespace) -> None:
    """Download a model. An interrupted download resumes."""
    name = arguments.model
    with bar(f"pulling {name}") as report:
        files = store.pull(name, lambda what, done, total: report(done, total))
    say(f"{name} is at {files.path} ({files.size_bytes / 2**20:.1f} MiB)")
