"""`quire serve`: an HTTP server with OpenAI's, Anthropic's and TGI's APIs."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import fields

from quire.cli.errors import say
from quire.cli.options import add_engine_options, add_fields, engine_config
from quire.config import api_key
from quire.progress import bar
from quire.store import resolve


def add_arguments(parser: argparse.ArgumentParser, *, without: Collection[str] = ()) -> None:
    from quire.server.config import ServerConfig

    add_fields(parser, "server", ServerConfig, without=without)
    add_engine_options(parser)


def run(arguments: argparse.Namespace) -> None:
    """Serve a model over HTTP."""
    from quire.server.config import ServerConfig

    given = {field.name: getattr(arguments, field.name) for field in fields(ServerConfig)}
    if arguments.api_key is None and arguments.api_key_file is None:
        given["api_key"] = api_key()
    config = ServerConfig(**given)
    engine = engine_config(arguments)
    with bar("downloading") as report:
        files = resolve(engine.model, progress=lambda what, done, total: report(done, total))
    from quire.server.main import run as serve

    def announce(address: str, summary: str) -> None:
        key = ' -H "Authorization: Bearer $QUIRE_API_KEY"' if config.api_key or config.api_key_file else ""
        say(summary)
        say(f"Serving at {address}  (Ctrl-C stops). Try:")
        say(
            f"curl {address}/v1/chat/completions{key} -H 'Content-Type: application/json' "
            """-d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 60}'"""
        )

    serve(engine, config, files.path, announce)
