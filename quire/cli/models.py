"""`quire models`: what can be named, and what is here already."""

from __future__ import annotations

import argparse
import json

from quire.cli.options import add_json
from quire.config import DEFAULT_MODEL
from quire.weights.store import ModelFiles, list_models


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def run(arguments: argparse.Namespace) -> None:
    """List the models that have a short name."""
    rows = [document(files) for files in list_models()]
    if arguments.json:
        print(json.dumps({"models": rows}))
        return
    for row in rows:
        here = row["path"] if row["cached"] else f"not here; fetch it with: quire pull {row['name']}"
        default = " (default)" if row["name"] == DEFAULT_MODEL else ""
        print(f"{row['name']}{default}  {row['size_bytes'] / 2**20:.1f} MiB  {here}")  # type: ignore[operator]


def document(files: ModelFiles) -> dict[str, object]:
    return {
        "name": files.name,
        "cached": files.cached,
        "size_bytes": files.size_bytes,
        "path": str(files.path) if files.cached else None,
    }
