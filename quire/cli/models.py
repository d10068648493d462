"""`quire models`: what can be named, and what is here already."""

from __future__ import annotations

import json

from quire.cli.options import JsonOption
from quire.config import DEFAULT_MODEL
from quire.weights.store import ModelFiles, list_models


def models(as_json: JsonOption = False) -> None:
    """List the models that have a short name."""
    rows = [document(files) for files in list_models()]
    if as_json:
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
