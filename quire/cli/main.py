"""The `quire` command. Each subcommand is a module with `add_arguments` and `run`.

Only the module of the command that is given is loaded: loading all of them would take longer than `quire models`.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from importlib import import_module

from quire import __version__
from quire.cli.errors import readable_errors

COMMANDS = {
    "serve": "Serve a model over HTTP.",
    "generate": "Answer prompts and exit. Without -p the prompt is read from standard input.",
    "chat": "Chat with a model; /help lists the commands.",
    "top": "Watch the engines of a server in the terminal.",
    "batch": "Answer the rows of a file. An interrupted job resumes.",
    "bench": "Measure speed.",
    "report": "Show results of quire bench as one page with charts.",
    "compare": "Compare the next-token distributions of two models, or of one with different options.",
    "quantize": "Make a smaller model of a model, and say what that costs.",
    "plan": "Plan for a model: memory, speed, prices and what bounds them, without loading it.",
    "advise": "Say which options would serve a load better, by simulating each.",
    "simulate": "Simulate a load on a measured engine.",
    "trace": "Record a server; replay, compare and export what was recorded.",
    "train-draft": "Train a draft head for a model, with nothing but the model.",
    "info": "Describe this machine and a model, without loading it.",
    "models": "List the models that have a short name, with their sizes.",
    "pull": "Download a model. An interrupted download resumes.",
}
ABOUT = "An LLM inference and serving engine: runs a model on this machine, for one user or many."


def make_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser, complete for the command that the arguments name."""
    parser = argparse.ArgumentParser("quire", description=ABOUT, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    named = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        if name == named:
            module = import_module(f"quire.cli.{name.replace('-', '_')}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def main() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # where the terminal's encoding lacks a character
    with readable_errors():
        parser = make_parser(sys.argv[1:])
        if len(sys.argv) == 1:
            parser.print_help(sys.stderr)
            raise SystemExit(2)
        arguments = parser.parse_args()
        arguments.run(arguments)


if __name__ == "__main__":
    main()
