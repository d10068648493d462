"""Jinja's filters, operators and string methods, with a check of the result's size before it is created.

Chat templates may use only the filters that are listed here. Sizes are upper estimates, since a real conversation stays
far below the limits.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2.filters import FILTERS

from quire.text.templates.budget import BoundExceeded, RenderBudget

Args = tuple[Any, ...]
Check = Callable[[RenderBudget, Args, Mapping[str, Any]], None]

_MAX_INT_BITS = 4096
_MAX_DIGITS = 100
_MAX_INT_DIGITS = 1240  # of an integer of _MAX_INT_BITS
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


def check_braces(budget: RenderBudget, text: str, args: Args, kwargs: Mapping[str, Any]) -> None:
    """Check `str.format` before it runs."""
    if _NESTED_FIELD.search(text.replace("{{", "")):
        raise BoundExceeded("it takes the width of a formatted field from a value")
    _check_fields(budget, text, _BRACE_FIELD.findall(text), (*args, *kwargs.values()))


def check_percent(budget: RenderBudget, text: str, args: Args) -> None:
    """Check `text % args` before it runs."""
    fields = _PERCENT_FIELD.findall(text)
    if any("*" in field for field in fields):
        raise BoundExceeded("it takes the width of a formatted field from a value")
    _check_fields(budget, text, fields, args)


def _check_fields(budget: RenderBudget, text: str, fields: Sequence[str], args: Args) -> None:
    """A field has the width in its specification and may repeat any argument."""
    for number in (number for field in fields for number in _NUMBER.findall(field)):
        budget.check_chars(int(number[:12]))
    budget.check_chars(len(text) + len(fields) * (budget.measure_all(args) + _MAX_INT_DIGITS))


def check_method(budget: RenderBudget, text: str, name: str, args: Args) -> Args:
    """Check a method of a string before it runs. Returns the arguments for the call."""
    if name == "replace" and len(args) > 1:
        budget.check_chars(len(text) + text.count(str(args[0])) * len(str(args[1])))
    elif name == "join" and args:
        items = budget.to_list(args[0])
        budget.check_chars(budget.measure(items) + len(items) * len(text))
        return (items,)
    elif name in ("center", "ljust", "rjust", "zfill") and args and isinstance(args[0], int):
        budget.check_chars(args[0])
    elif name in _SLOW_METHODS:
        _check_search(text, args)
    return args


def _check_search(text: str, args: Args) -> None:
    """In the worst case these methods compare each character of the text with each of the argument."""
    if any(len(text) * len(sought) > _MAX_COMPARISONS for sought in args if isinstance(sought, str)):
        raise BoundExceeded(f"it seeks a long text in a long text with more than {_MAX_COMPARISONS} comparisons")


def check_operator(budget: RenderBudget, operator: str, left: Any, right: Any) -> None:
    """Check a binary operator before it runs."""
    budget.check_time()
    if operator == "*":
        _check_product(budget, left, right)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_int(left.bit_length() * max(right, 0))
    elif operator == "+" and isinstance(left, str) and isinstance(right, str):
        budget.check_chars(len(left) + len(right))
    elif operator == "+" and isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        budget.check_elements(len(left) + len(right))
    elif operator == "%" and isinstance(left, str):
        check_percent(budget, left, right if isinstance(right, tuple) else (right,))


def _check_product(budget: RenderBudget, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_int(left.bit_length() + right.bit_length())
    for text, times in ((left, right), (right, left)):
        if isinstance(text, Sequence) and isinstance(times, int):
            fit = budget.check_chars if isinstance(text, str) else budget.check_elements
            fit(len(text) * max(times, 0))


def _check_int(num_bits: int) -> None:
    if num_bits > _MAX_INT_BITS:
        raise BoundExceeded(f"it made a number of more than {_MAX_INT_BITS} bits")


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
