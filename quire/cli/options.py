"""What commands share: engine flags made from EngineConfig's fields, so that the two never drift apart, and errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from quire.config import DEFAULT_MODEL, EngineConfig
from quire.errors import QuireError

MODEL_HELP = "an alias (see `quire models`), a directory, a .gguf file, or a hub name; %(default)s if not given"


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help=MODEL_HELP)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout and nothing else")


def add_engine_options(parser: argparse.ArgumentParser, *, without: Collection[str] = ()) -> None:
    """MODEL and a flag for every other field of EngineConfig, but for those that would change nothing there."""
    add_model(parser)
    add_fields(parser, "engine", EngineConfig, without=("model", *without))


def add_fields(parser: argparse.ArgumentParser, title: str, config: type, *, without: Collection[str] = ()) -> None:
    """A flag for every field of a config made of `option`s."""
    group = parser.add_argument_group(title)
    hints = get_type_hints(config)
    for field in fields(config):
        if field.name in without:
            continue
        text = field.metadata["help"].replace("%", "%%")
        shape = _shape(hints[field.name], text, field.default)
        if "type" in shape:
            shape["metavar"] = field.metadata["metavar"] or _metavar(field.name, shape["type"])
        group.add_argument(f"--{field.name.replace('_', '-')}", default=field.default, **shape)


def _shape(hint: Any, text: str, default: Any) -> dict[str, Any]:
    """How a field of that type is written on the command line."""
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction, "help": f"{text} Default: {'on' if default else 'off'}."}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint), "help": f"{text} Default: %(default)s."}
    if get_origin(hint) is UnionType:
        (kind,) = (one for one in get_args(hint) if one is not NoneType)
        return {"type": kind, "help": text}
    return {"type": hint, "help": f"{text} Default: %(default)s."}


def _metavar(name: str, kind: type) -> str:
    return {int: "N", float: "X"}.get(kind) or name.rpartition("_")[2].upper()


def engine_config(arguments: argparse.Namespace, **more: Any) -> EngineConfig:
    given = {name: value for name, value in vars(arguments).items() if name in EngineConfig.__slots__}
    return EngineConfig.of(given | more)


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
