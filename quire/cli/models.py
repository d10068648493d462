"""`quire models`: the aliases, their sizes, and which of them are on this machine."""

from __future__ import annotations

import argparse
import json

from quire.cli.options import add_json
from quire.config import DEFAULT_MODEL
from quire.store import ListedModel, list_models
from quire.store.aliases import HubModel

NOTES = """\
`quire pull NAME` downloads a model. generate, chat, serve and bench download a missing one.
Memory is that of the weights, without the KV cache. Sizes of hub models are computed from their parameter counts.
A gated model needs an account on huggingface.co: accept the terms on the model's page, then run `hf auth login`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def run(arguments: argparse.Namespace) -> None:
    """List the models that have a short name, with their sizes."""
    models = list_models()
    if arguments.json:
        print(json.dumps({"models": [document(model) for model in models]}))
        return
    print(f"{'name':<24}{'download':>16}{'memory':>16}  location")
    for model in models:
        print(format_row(model))
    print(NOTES)


def document(model: ListedModel) -> dict[str, object]:
    """`size_bytes` is the size of the download. With `estimated`, both sizes come from the parameter count."""
    alias = model.alias
    hub = alias if isinstance(alias, HubModel) else None
    return {
        "name": model.name,
        "cached": model.cached,
        "size_bytes": alias.size_bytes,
        "memory_bytes": alias.memory_bytes,
        "estimated": hub is not None,
        "repository": hub.repository if hub else None,
        "gated": hub.gated if hub else False,
        "licence": alias.licence,
        "path": str(model.path) if model.cached else None,
    }


def format_row(model: ListedModel) -> str:
    alias = model.alias
    about = "about " if isinstance(alias, HubModel) else ""
    name = model.name + (" (default)" if model.name == DEFAULT_MODEL else "")
    sizes = [f"{about + format_bytes(num_bytes):>16}" for num_bytes in (alias.size_bytes, alias.memory_bytes)]
    return f"{name:<24}{''.join(sizes)}  {location(model)}"


def location(model: ListedModel) -> str:
    if model.cached:
        return str(model.path)
    if not isinstance(model.alias, HubModel):
        return f"not downloaded (package {model.alias.package})"
    gated = ", gated" if model.alias.gated else ""
    return f"not downloaded ({model.alias.repository}{gated})"


def format_bytes(num_bytes: int) -> str:
    mib = num_bytes / 2**20
    return f"{mib:.1f} MiB" if mib < 1000 else f"{mib / 1024:.2f} GiB"
