"""The `quire` command. Each subcommand is a module with `add_arguments` and `run`."""

from __future__ import annotations

import argparse
import sys

from quire import __version__
from quire.cli import bench, chat, generate, info, models, pull, serve
from quire.cli.options import readable_errors

COMMANDS = {
    "serve": serve,
    "generate": generate,
    "chat": chat,
    "bench": bench,
    "info": info,
    "models": models,
    "pull": pull,
}
ABOUT = "An LLM inference and serving engine: runs a model on this machine, for one user or many."


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("quire", description=ABOUT, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        about = (module.run.__doc__ or "").strip()
        command = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main() -> None:
    with readable_errors():
        parser = make_parser()
        if len(sys.argv) == 1:
            parser.print_help(sys.stderr)
            raise SystemExit(2)
        arguments = parser.parse_args()
        arguments.run(arguments)


if __name__ == "__main__":
    main()
