"""Command line flags made from EngineConfig's fields, so that the two never drift apart, and what commands share."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer

from quire.config import DEFAULT_MODEL, EngineConfig
from quire.errors import QuireError

MODEL_HELP = "An alias (see `quire models`), a directory, a .gguf file, or a hub name."
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=True)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
PANEL = "Engine"


def takes_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command `model` and all engine flags; it receives them as one `config`."""
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "config"]
    flags = [_flag(name, hint) for name, hint in get_type_hints(EngineConfig).items() if name != "model"]
    model = inspect.Parameter(
        "model", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=DEFAULT_MODEL, annotation=ModelArgument
    )
    names = ["model", *(flag.name for flag in flags)]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        config = EngineConfig.of({name: values.pop(name) for name in names})
        command(config=config, **values)

    parameters = [model, *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own), *flags]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _flag(name: str, hint: Any) -> inspect.Parameter:
    spec = next(f for f in fields(EngineConfig) if f.name == name)
    option = typer.Option(help=spec.metadata["help"], rich_help_panel=PANEL)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=spec.default, annotation=Annotated[hint, option]
    )


def say(text: str) -> None:
    """A line for the person at the terminal."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def readable_errors() -> Iterator[None]:
    """What quire raises on purpose is one line and an exit status; Ctrl-C is silent."""
    try:
        yield
    except QuireError as error:
        say(f"error: {error}")
        raise SystemExit(2 if error.status == 400 else 1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone; the interpreter must not complain on exit
        raise SystemExit(141) from None
