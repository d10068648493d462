"""What commands share: flags generated from the fields of EngineConfig."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from quire.config import DEFAULT_MODEL, EngineConfig, flag_of

MODEL_HELP = "an alias (see `quire models`), a directory, a .gguf file, or a hub name; default %(default)s"


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help=MODEL_HELP)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")


def add_engine_options(parser: argparse.ArgumentParser, *, without: Collection[str] = ()) -> None:
    """MODEL, and a flag for every other field of EngineConfig except `without`, which have no effect in the command."""
    add_model(parser)
    add_fields(parser, "engine", EngineConfig, without=("model", *without))


def add_fields(
    parser: argparse.ArgumentParser,
    title: str,
    config: type,
    *,
    without: Collection[str] = (),
    only_given: bool = False,
) -> None:
    """A flag for every field of a config whose fields are `option`s. With `only_given` there are no defaults: a flag
    that is not on the command line is not among the arguments."""
    group = parser.add_argument_group(title)
    hints = get_type_hints(config)
    for field in fields(config):
        if field.name in without:
            continue
        text = field.metadata["help"].replace("%", "%%")
        options = _argument_options(hints[field.name], text, None if only_given else field.default)
        if "type" in options:
            options["metavar"] = field.metadata["metavar"] or _metavar(field.name, options["type"])
        default = argparse.SUPPRESS if only_given else field.default
        group.add_argument(flag_of(field), dest=field.name, default=default, **options)


def _argument_options(hint: Any, text: str, default: Any) -> dict[str, Any]:
    """The arguments of `add_argument` for a field of that type."""
    shown = "" if default is None else " Default: %(default)s."
    if hint is bool:
        shown = shown and f" Default: {'on' if default else 'off'}."
        return {"action": argparse.BooleanOptionalAction, "help": f"{text}{shown}"}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint), "help": f"{text}{shown}"}
    if get_origin(hint) is UnionType:
        (kind,) = (one for one in get_args(hint) if one is not NoneType)
        return {"type": kind, "help": text}
    return {"type": hint, "help": f"{text}{shown}"}


def _metavar(name: str, kind: type) -> str:
    return {int: "N", float: "X"}.get(kind) or name.rpartition("_")[2].upper()


def engine_config(arguments: argparse.Namespace, **more: Any) -> EngineConfig:
    given = {name: value for name, value in vars(arguments).items() if name in EngineConfig.__slots__}
    return EngineConfig.of(given | more)
