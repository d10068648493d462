"""The filters of chat templates: Jinja's, with a check of the result's size before it is created.

Templates may use only the filters that are listed here. Sizes are upper estimates, since a real conversation stays far
below the limits.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from jinja2.filters import FILTERS

from quire.text.templates.sandbox import BoundExceeded, RenderBudget, check_percent, check_search

Args = tuple[Any, ...]
Check = Callable[[RenderBudget, Args, Mapping[str, Any]], None]

_MAX_DIGITS = 100

# fmt: off
_SEQUENCE_FILTERS = (
    "batch", "dictsort", "first", "groupby", "items", "join", "last", "list", "map", "max", "min", "reject",
    "rejectattr", "reverse", "select", "selectattr", "slice", "sort", "sum", "unique",
)
_TEXT_FILTERS = (
    "abs", "attr", "capitalize", "center", "count", "d", "default", "e", "escape", "float", "forceescape", "format",
    "indent", "int", "length", "lower", "replace", "round", "safe", "string", "title", "trim", "truncate", "upper",
    "wordcount",
)
# fmt: on


def bounded_filters(budget: RenderBudget) -> dict[str, Callable[..., Any]]:
    """The filters of chat templates."""
    filters = {name: _bound(budget, name, FILTERS[name]) for name in (*_SEQUENCE_FILTERS, *_TEXT_FILTERS)}
    filters["tojson"] = functools.partial(_to_json, budget)
    return filters


def _bound(budget: RenderBudget, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    check = _CHECKS.get(name)
    is_sequence = name in _SEQUENCE_FILTERS
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # Jinja passes its context as the first argument

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget.check_time()
        given = args[first:]
        if given and is_sequence and isinstance(given[0], str):
            budget.check_elements(len(given[0]))
        if given and name == "join":
            given = (budget.to_list(given[0]), *given[1:])
        if check is not None:
            check(budget, given, kwargs)
        return budget.check_value(function(*args[:first], *given, **kwargs))

    return bounded


def _argument(args: Args, kwargs: Mapping[str, Any], index: int, name: str, default: Any) -> Any:
    return args[index] if len(args) > index else kwargs.get(name, default)


def _check_replace(budget: RenderBudget, args: Args, kwargs: Mapping[str, Any]) -> None:
    text, old, new = (str(_argument(args, kwargs, i, name, "")) for i, name in enumerate(("s", "old", "new")))
    budget.check_chars(len(text) + text.count(old) * len(new))


def _check_join(budget: RenderBudget, args: Args, kwargs: Mapping[str, Any]) -> None:
    budget.check_chars(budget.measure(args[0]) + len(args[0]) * len(str(_argument(args, kwargs, 1, "d", ""))))


def _check_indent(budget: RenderBudget, args: Args, kwargs: Mapping[str, Any]) -> None:
    text, width = str(_argument(args, kwargs, 0, "s", "")), _argument(args, kwargs, 1, "width", 4)
    size = len(width) if isinstance(width, str) else int(width)
    budget.check_chars(len(text) + (len(text.splitlines()) + 1) * size)


def _check_width(budget: RenderBudget, args: Args, kwargs: Mapping[str, Any]) -> None:
    budget.check_chars(
        max((abs(value) for value in (*args[1:], *kwargs.values()) if isinstance(value, int)), default=0)
    )


def _check_count(budget: RenderBudget, args: Args, kwargs: Mapping[str, Any]) -> None:
    budget.check_elements(max((abs(v) for v in (*args[1:], *kwargs.values()) if isinstance(v, int)), default=0))


def _check_round(budget: RenderBudget, args: Args, kwargs: Mapping[str, Any]) -> None:
    if abs(int(_argument(args, kwargs, 1, "precision", 0))) > _MAX_DIGITS:
        raise BoundExceeded(f"it rounds to more than {_MAX_DIGITS} digits")


def _check_words(budget: RenderBudget, args: Args, kwargs: Mapping[str, Any]) -> None:
    budget.check_elements(len(str(_argument(args, kwargs, 0, "s", ""))) // 4)


def _check_sum(budget: RenderBudget, args: Args, kwargs: Mapping[str, Any]) -> None:
    if not isinstance(_argument(args, kwargs, 2, "start", 0), (int, float)):
        raise BoundExceeded("it sums something other than numbers")


def _check_format(budget: RenderBudget, args: Args, kwargs: Mapping[str, Any]) -> None:
    check_percent(budget, str(args[0]), (*args[1:], *kwargs.values()))


def _check_trim(budget: RenderBudget, args: Args, kwargs: Mapping[str, Any]) -> None:
    check_search(str(_argument(args, kwargs, 0, "value", "")), (*args[1:], *kwargs.values()))


_CHECKS: dict[str, Check] = {
    "replace": _check_replace,
    "join": _check_join,
    "indent": _check_indent,
    "center": _check_width,
    "truncate": _check_width,
    "batch": _check_count,
    "slice": _check_count,
    "round": _check_round,
    "sum": _check_sum,
    "format": _check_format,
    "trim": _check_trim,
    "title": _check_words,
    "wordcount": _check_words,
}


def _to_json(
    budget: RenderBudget,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, unlike Jinja's own filter."""
    budget.measure(value)
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=None if separators is None else (str(separators[0]), str(separators[1])),
        sort_keys=sort_keys,
    )
    if indent is None and separators is None:
        return str(budget.check_value(encoder.encode(value)))
    if indent is not None:
        budget.check_chars(len(indent) if isinstance(indent, str) else abs(int(indent)))
    chunks, size = [], 0
    for chunk in encoder.iterencode(value):
        size += len(chunk)
        if size > budget.max_chars:
            budget.check_chars(size)
        chunks.append(chunk)
    return str(budget.check_value("".join(chunks)))
