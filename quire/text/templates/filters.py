"""Jinja's filters, operators and string methods with a look at the result's size before it is made.

A filter that is not here does not exist for chat templates: what models use is here, the rest only adds ways to be
attacked. Sizes are estimated from above, generously, since a real conversation stays far below the bound.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2.filters import FILTERS

from quire.text.templates.budget import BoundExceeded, Budget

Args = tuple[Any, ...]
Check = Callable[[Budget, Args, Mapping[str, Any]], None]

_MAX_INT_BITS = 4096
_MAX_DIGITS = 100
_MAX_INT_DIGITS = 1240  # of a number of that many bits
_MAX_COMPARISONS = 1 << 26
_BRACE_FIELD = re.compile(r"\{[^{}]*\}")
_NESTED_FIELD = re.compile(r"\{[^{}]*\{")
_PERCENT_FIELD = re.compile(r"%[^A-Za-z%]*")
_NUMBER = re.compile(r"\d+")
_SLOW_METHODS = frozenset(("rfind", "rindex", "rsplit", "rpartition", "strip", "lstrip", "rstrip"))

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


def bounded_filters(budget: Budget) -> dict[str, Callable[..., Any]]:
    """Every filter a chat template may use."""
    filters = {name: _bound(budget, name, FILTERS[name]) for name in (*_SEQUENCE_FILTERS, *_TEXT_FILTERS)}
    filters["tojson"] = functools.partial(_to_json, budget)
    return filters


def _bound(budget: Budget, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    check = _CHECKS.get(name)
    is_sequence = name in _SEQUENCE_FILTERS
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # what Jinja itself hands over comes first

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget.tick()
        given = args[first:]
        if given and is_sequence and isinstance(given[0], str):
            budget.fit_elements(len(given[0]))
        if given and name == "join":
            given = (budget.collect(given[0]), *given[1:])
        if check is not None:
            check(budget, given, kwargs)
        return budget.admit(function(*args[:first], *given, **kwargs))

    return bounded


def _argument(args: Args, kwargs: Mapping[str, Any], index: int, name: str, default: Any) -> Any:
    return args[index] if len(args) > index else kwargs.get(name, default)


def _check_replace(budget: Budget, args: Args, kwargs: Mapping[str, Any]) -> None:
    text, old, new = (str(_argument(args, kwargs, i, name, "")) for i, name in enumerate(("s", "old", "new")))
    budget.fit(len(text) + text.count(old) * len(new))


def _check_join(budget: Budget, args: Args, kwargs: Mapping[str, Any]) -> None:
    budget.fit(budget.weigh(args[0]) + len(args[0]) * len(str(_argument(args, kwargs, 1, "d", ""))))


def _check_indent(budget: Budget, args: Args, kwargs: Mapping[str, Any]) -> None:
    text, width = str(_argument(args, kwargs, 0, "s", "")), _argument(args, kwargs, 1, "width", 4)
    size = len(width) if isinstance(width, str) else int(width)
    budget.fit(len(text) + (len(text.splitlines()) + 1) * size)


def _check_width(budget: Budget, args: Args, kwargs: Mapping[str, Any]) -> None:
    budget.fit(max((abs(value) for value in (*args[1:], *kwargs.values()) if isinstance(value, int)), default=0))


def _check_count(budget: Budget, args: Args, kwargs: Mapping[str, Any]) -> None:
    budget.fit_elements(max((abs(v) for v in (*args[1:], *kwargs.values()) if isinstance(v, int)), default=0))


def _check_round(budget: Budget, args: Args, kwargs: Mapping[str, Any]) -> None:
    if abs(int(_argument(args, kwargs, 1, "precision", 0))) > _MAX_DIGITS:
        raise BoundExceeded(f"it rounds to more than {_MAX_DIGITS} digits")


def _check_words(budget: Budget, args: Args, kwargs: Mapping[str, Any]) -> None:
    budget.fit_elements(len(str(_argument(args, kwargs, 0, "s", ""))) // 4)


def _check_sum(budget: Budget, args: Args, kwargs: Mapping[str, Any]) -> None:
    if not isinstance(_argument(args, kwargs, 2, "start", 0), (int, float)):
        raise BoundExceeded("it sums something other than numbers")


def _check_format(budget: Budget, args: Args, kwargs: Mapping[str, Any]) -> None:
    check_percent(budget, str(args[0]), (*args[1:], *kwargs.values()))


def _check_trim(budget: Budget, args: Args, kwargs: Mapping[str, Any]) -> None:
    _check_search(str(_argument(args, kwargs, 0, "value", "")), (*args[1:], *kwargs.values()))


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


def check_braces(budget: Budget, text: str, args: Args, kwargs: Mapping[str, Any]) -> None:
    """Before `str.format`."""
    if _NESTED_FIELD.search(text.replace("{{", "")):
        raise BoundExceeded("it takes the width of a formatted field from a value")
    _fit_fields(budget, text, _BRACE_FIELD.findall(text), (*args, *kwargs.values()))


def check_percent(budget: Budget, text: str, args: Args) -> None:
    """Before `text % args`."""
    fields = _PERCENT_FIELD.findall(text)
    if any("*" in field for field in fields):
        raise BoundExceeded("it takes the width of a formatted field from a value")
    _fit_fields(budget, text, fields, args)


def _fit_fields(budget: Budget, text: str, fields: Sequence[str], args: Args) -> None:
    """Each field is as wide as its number says, and may repeat any of the arguments."""
    for number in (number for field in fields for number in _NUMBER.findall(field)):
        budget.fit(int(number[:12]))
    budget.fit(len(text) + len(fields) * (budget.weigh_all(args) + _MAX_INT_DIGITS))


def check_method(budget: Budget, text: str, name: str, args: Args) -> Args:
    """Before a method of a string; returns the arguments to call it with."""
    if name == "replace" and len(args) > 1:
        budget.fit(len(text) + text.count(str(args[0])) * len(str(args[1])))
    elif name == "join" and args:
        items = budget.collect(args[0])
        budget.fit(budget.weigh(items) + len(items) * len(text))
        return (items,)
    elif name in ("center", "ljust", "rjust", "zfill") and args and isinstance(args[0], int):
        budget.fit(args[0])
    elif name in _SLOW_METHODS:
        _check_search(text, args)
    return args


def _check_search(text: str, args: Args) -> None:
    """These compare, at worst, every character of the text with every character of the argument."""
    if any(len(text) * len(sought) > _MAX_COMPARISONS for sought in args if isinstance(sought, str)):
        raise BoundExceeded(f"it seeks a long text in a long text with more than {_MAX_COMPARISONS} comparisons")


def check_operator(budget: Budget, operator: str, left: Any, right: Any) -> None:
    """Before a binary operator."""
    budget.tick()
    if operator == "*":
        _check_product(budget, left, right)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_int(left.bit_length() * max(right, 0))
    elif operator == "+" and isinstance(left, str) and isinstance(right, str):
        budget.fit(len(left) + len(right))
    elif operator == "+" and isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        budget.fit_elements(len(left) + len(right))
    elif operator == "%" and isinstance(left, str):
        check_percent(budget, left, right if isinstance(right, tuple) else (right,))


def _check_product(budget: Budget, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_int(left.bit_length() + right.bit_length())
    for text, times in ((left, right), (right, left)):
        if isinstance(text, Sequence) and isinstance(times, int):
            fit = budget.fit if isinstance(text, str) else budget.fit_elements
            fit(len(text) * max(times, 0))


def _check_int(num_bits: int) -> None:
    if num_bits > _MAX_INT_BITS:
        raise BoundExceeded(f"it made a number of more than {_MAX_INT_BITS} bits")


def _to_json(
    budget: Budget,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, with no HTML escapes."""
    budget.weigh(value)
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=None if separators is None else (str(separators[0]), str(separators[1])),
        sort_keys=sort_keys,
    )
    if indent is None and separators is None:
        return str(budget.admit(encoder.encode(value)))
    if indent is not None:
        budget.fit(len(indent) if isinstance(indent, str) else abs(int(indent)))
    chunks, size = [], 0
    for chunk in encoder.iterencode(value):
        size += len(chunk)
        if size > budget.max_chars:
            budget.fit(size)
        chunks.append(chunk)
    return str(budget.admit("".join(chunks)))
