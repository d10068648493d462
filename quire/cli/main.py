"""The `quire` command. Each subcommand is a file of its own; this one only puts them together."""

from __future__ import annotations

import typer

from quire import __version__
from quire.cli import bench, chat, generate, info, models, pull
from quire.cli.options import readable_errors

app = typer.Typer(
    name="quire",
    help="An LLM inference engine: runs a model on this machine, alone or many requests at a time.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("info")(info.info)
app.command("pull")(pull.pull)
app.command("models")(models.models)
app.add_typer(bench.app, name="bench")


def show_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=show_version, is_eager=True, help="Print the version."),
) -> None:
    """An LLM inference engine: runs a model on this machine, alone or many requests at a time."""


def main() -> None:
    with readable_errors():
        app()


if __name__ == "__main__":
    main()
