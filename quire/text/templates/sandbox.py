"""Sandbox: the Jinja environment of chat templates, and RenderBudget, the limits of one rendering.

A template comes from a model file or a request, so it is untrusted code. Sandbox is Jinja's sandbox; it checks every
operation that can take long or create something large against the budget first. The budget limits time, text size,
structure size and call depth. `parse_guarded` adds checks to the syntax tree (`guards.py`); filters have their checks
in `filters.py`.

An environment serves one rendering at a time, so its budget needs no lock. Creating an environment takes longer than a
rendering, so `ChatTemplate` reuses them.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.lexer import Token, TokenStream
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, TemplateReference, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace, pass_context

from quire.text.templates.guards import CHECK_VALUE, CONCAT, SPEND, GuardTransformer

Args = tuple[Any, ...]

_ELEMENT_SIZE = 16  # the size of a list element, in characters
_MAX_CALL_DEPTH = 128
_WORK_FACTOR = 32  # intermediate text may be this many times the output limit
_STRUCTURES = (list, tuple, dict, KeysView, ValuesView, ItemsView)
_MAX_INT_BITS = 4096
_MAX_INT_DIGITS = 1240  # of an integer of _MAX_INT_BITS
_MAX_COMPARISONS = 1 << 26
_BRACE_FIELD = re.compile(r"\{[^{}]*\}")
_NESTED_FIELD = re.compile(r"\{[^{}]*\{")
_PERCENT_FIELD = re.compile(r"%[^A-Za-z%]*")
_NUMBER = re.compile(r"\d+")
_SLOW_METHODS = frozenset(("rfind", "rindex", "rsplit", "rpartition", "strip", "lstrip", "rstrip"))
MAX_TOKENS = 16_000  # of a template, for its parser
_MAX_DATE_FORMAT = 256
_RUNTIME = (Namespace, LoopContext, Macro, Cycler, Joiner, TemplateReference, BlockReference, Undefined)
# fmt: off
_TEXT_METHODS = frozenset((
    "capitalize", "casefold", "center", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii",
    "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper",
    "join", "ljust", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex",
    "rjust", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title",
    "upper", "zfill",
))
# fmt: on
_ATTRIBUTES: dict[type, frozenset[str]] = {
    str: _TEXT_METHODS,
    dict: frozenset(("get", "items", "keys", "values", "copy")),
    list: frozenset(("count", "index", "copy")),
    tuple: frozenset(("count", "index", "grouper", "list")),
}


class BoundExceeded(Exception):
    """A limit is exceeded. `ChatTemplate` converts it into a `TemplateError`."""


@dataclass(slots=True)
class RenderBudget:
    """Used by one rendering in one thread. `reset` prepares it for the next."""

    max_seconds: float
    max_chars: int  # of each text, of each structure with its contents, and of the output
    deadline: float = field(init=False)
    work_left: int = field(init=False)
    depth: int = field(init=False)
    # The size of each structure by id. The structure is referenced, so that its id is not reused.
    _sizes: dict[int, tuple[Any, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start a new rendering."""
        self.depth = 0
        self._sizes.clear()
        self.deadline = time.monotonic() + self.max_seconds
        self.work_left = _WORK_FACTOR * self.max_chars

    def check_time(self) -> None:
        """Raise if the time is over."""
        if time.monotonic() > self.deadline:
            raise BoundExceeded(f"it ran longer than {self.max_seconds:g} s")

    def spend(self, work: int) -> None:
        """Count bytes of intermediate text."""
        self.check_time()
        self.work_left -= work
        if self.work_left < 0:
            raise BoundExceeded(f"it made more than {_WORK_FACTOR * self.max_chars} bytes of text on its way")

    def check_chars(self, num_chars: int) -> None:
        """Check the length of a text before it is created."""
        if num_chars > self.max_chars:
            raise BoundExceeded(f"it made a text of more than {self.max_chars} characters")
        self.spend(num_chars)

    def check_elements(self, num_elements: int) -> None:
        """Check the length of a list before it is created."""
        if num_elements * _ELEMENT_SIZE > self.max_chars:
            raise BoundExceeded(f"it made a list of more than {self.max_chars // _ELEMENT_SIZE} elements")
        self.spend(num_elements * _ELEMENT_SIZE)

    def enter_call(self) -> None:
        """Count a nested call. The caller decrements `depth` when the call ends."""
        if self.depth >= _MAX_CALL_DEPTH:
            raise BoundExceeded(f"its calls are nested more than {_MAX_CALL_DEPTH} deep")
        self.depth += 1

    def measure(self, value: Any) -> int:
        """The size of a value with all its contents. A shared value counts each time it occurs.

        A limit on this size limits the cost of printing, comparing or hashing the value.
        """
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, _STRUCTURES):
            return 1
        seen = self._sizes.get(id(value))
        if seen is None:
            seen = self._sizes[id(value)] = (value, self.measure_all(_elements(value)))
        return seen[1]

    def measure_all(self, elements: Iterable[Any]) -> int:
        """The size of a structure with these elements."""
        size = count = 0
        for element in elements:
            count += 1
            size += _ELEMENT_SIZE + self.measure(element)
            self._check_size(size)
        self.spend(count * _ELEMENT_SIZE)
        return size

    def _check_size(self, size: int) -> None:
        if size > self.max_chars:
            raise BoundExceeded(f"it made a structure with more than {self.max_chars} characters in it")

    def check_sum(self, value: Any, left: Any, right: Any) -> Any:
        """Check the sum of two lists without iterating over it. Templates append messages this way, one by one."""
        size = self.measure(left) + self.measure(right)
        self._check_size(size)
        self._sizes[id(value)] = (value, size)
        return value

    def check_value(self, value: Any) -> Any:
        """Check a new value of the template. An iterator is wrapped, so that its values are checked."""
        if isinstance(value, str):
            self.check_chars(len(value))
            self.spend(sys.getsizeof(value))
        elif isinstance(value, _STRUCTURES):
            self.measure(value)
        elif isinstance(value, Iterator):
            return self.iterate(value)
        return value

    def iterate(self, values: Iterable[Any]) -> Iterator[Any]:
        """The same values, with a time check for each."""
        for value in values:
            self.check_time()
            yield value

    def to_list(self, values: Iterable[Any]) -> list[Any]:
        """The values as a list, if it is not too long."""
        collected = []
        for value in self.iterate(values):
            collected.append(value)
            if len(collected) * _ELEMENT_SIZE > self.max_chars:
                self.check_elements(len(collected))
        self.measure(collected)
        return collected


def _elements(value: Any) -> Iterable[Any]:
    return (element for item in value.items() for element in item) if isinstance(value, dict) else value


class RaisedByTemplate(jinja2.TemplateError):
    """The template called `raise_exception`."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Gives access to the conversation only, and checks the budget before each operation that may be expensive."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def __init__(self, budget: RenderBudget, filters: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[TokenLimit, GenerationTag, loopcontrols],
            optimized=False,  # constant folding would run template code at compile time, without a budget
            finalize=pass_context(lambda context, value: self._finalize(value)),
            cache_size=0,
        )
        self.budget = budget
        self.filters = {**filters, SPEND: self._spend, CHECK_VALUE: budget.check_value, CONCAT: self._concat}
        self.globals = {name: DEFAULT_NAMESPACE[name] for name in ("cycler", "joiner")} | {
            "range": self.globals["range"],
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def parse_guarded(self, source: str) -> nodes.Template:
        """Parse a template and insert the guards."""
        tree: nodes.Template = GuardTransformer().visit(self.parse(source))
        tree.set_environment(self)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow listed attributes only."""
        if not super().is_safe_attribute(obj, attr, value):
            return False
        return isinstance(obj, _RUNTIME) or any(
            isinstance(obj, kind) and attr in names for kind, names in _ATTRIBUTES.items()
        )

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Check time, depth and the size of the result of each call."""
        budget = __self.budget
        budget.check_time()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            args = _check_method(budget, owner, getattr(__obj, "__name__", ""), args)
        elif isinstance(__obj, Macro):
            budget.measure_all((*args, *kwargs.values()))
        budget.enter_call()
        try:
            return budget.check_value(super().call(__context, __obj, *args, **kwargs))
        finally:
            budget.depth -= 1

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Check an operator, because its result can be much larger than its operands."""
        _check_operator(self.budget, operator, left, right)
        result = super().call_binop(context, operator, left, right)
        if operator == "+" and isinstance(result, (list, tuple)):
            return self.budget.check_sum(result, left, right)
        return self.budget.check_value(result)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` with a check of its field widths."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            _check_braces(self.budget, value.__self__, args, kwargs)
            return str(self.budget.check_value(wrapped(*args, **kwargs)))

        return bounded

    def _spend(self, size: int) -> bool:
        self.budget.spend(size)
        return True

    def _concat(self, operands: Sequence[Any]) -> str:
        self.budget.measure(operands)
        return str(self.budget.check_value("".join(map(str, operands))))

    def _finalize(self, value: Any) -> Any:
        self.budget.spend(self.budget.measure(value))
        return value


class _Namespace(Namespace):
    """Jinja's namespace without names that begin with an underscore. Its repr hides the contents."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {name!r}")


def _raise_exception(message: object) -> NoReturn:
    raise RaisedByTemplate(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > _MAX_DATE_FORMAT:
        raise BoundExceeded(f"its date format is longer than {_MAX_DATE_FORMAT} characters")
    return datetime.now().strftime(pattern)


class TokenLimit(Extension):
    """Limits the work of parsing and compiling, which has no budget."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        """The tokens, up to the limit."""
        for count, token in enumerate(stream):
            if count > MAX_TOKENS:
                raise BoundExceeded(f"it has more than {MAX_TOKENS} tokens")
            yield token


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training. Here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Return the body without the tag."""
        lineno = next(parser.stream).lineno
        body: Any = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


# ── checks of operators and string methods ────────────────────────────────────────────────────────────────────────


def _check_braces(budget: RenderBudget, text: str, args: Args, kwargs: Mapping[str, Any]) -> None:
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
    for number in (number for spec in fields for number in _NUMBER.findall(spec)):
        budget.check_chars(int(number[:12]))
    budget.check_chars(len(text) + len(fields) * (budget.measure_all(args) + _MAX_INT_DIGITS))


def _check_method(budget: RenderBudget, text: str, name: str, args: Args) -> Args:
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
        check_search(text, args)
    return args


def check_search(text: str, args: Args) -> None:
    """In the worst case these methods compare each character of the text with each of the argument."""
    if any(len(text) * len(sought) > _MAX_COMPARISONS for sought in args if isinstance(sought, str)):
        raise BoundExceeded(f"it seeks a long text in a long text with more than {_MAX_COMPARISONS} comparisons")


def _check_operator(budget: RenderBudget, operator: str, left: Any, right: Any) -> None:
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
