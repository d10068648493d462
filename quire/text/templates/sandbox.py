"""The Jinja environment that chat templates run in: Jinja's own sandbox, and a budget on top.

One environment serves one rendering at a time, so that its budget needs no lock. Making one takes longer than a
rendering, so `ChatTemplate` keeps those that it has made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from jinja2.visitor import NodeTransformer

from quire.text.templates.budget import BoundExceeded, Budget
from quire.text.templates.filters import bounded_filters, check_braces, check_method, check_operator

MAX_TOKENS = 16_000
TICK, ADMIT, CONCAT = "tick!", "admit!", "concat!"
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


class Refused(jinja2.TemplateError):
    """The template itself said no, through `raise_exception`."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Reaches nothing but the conversation, and asks its budget before anything that may take long or grow."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def __init__(self, budget: Budget) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[TokenLimit, GenerationTag, loopcontrols],
            optimized=False,  # folding constants would run template code at compile time, outside any budget
            finalize=pass_context(lambda context, value: self._print(value)),
            cache_size=0,
        )
        self.budget = budget
        self.filters = bounded_filters(budget)
        self.filters |= {TICK: self._step, ADMIT: budget.admit, CONCAT: self._concat}
        self.globals = {name: DEFAULT_NAMESPACE[name] for name in ("cycler", "joiner")} | {
            "range": self.globals["range"],
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "namespace": _Namespace,
            "raise_exception": _refuse,
            "strftime_now": _format_now,
        }

    def guard(self, source: str) -> nodes.Template:
        """Parse a template and put the guards in."""
        tree: nodes.Template = Guards().visit(self.parse(source))
        tree.set_environment(self)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Only what is listed; data from a caller has no methods that a template could need."""
        if not super().is_safe_attribute(obj, attr, value):
            return False
        return isinstance(obj, _RUNTIME) or any(
            isinstance(obj, kind) and attr in names for kind, names in _ATTRIBUTES.items()
        )

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Every call is a step, may go only so deep, and must return something of bounded size."""
        budget = __self.budget
        budget.tick()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            args = check_method(budget, owner, getattr(__obj, "__name__", ""), args)
        elif isinstance(__obj, Macro):
            budget.weigh_all((*args, *kwargs.values()))
        budget.enter()
        try:
            return budget.admit(super().call(__context, __obj, *args, **kwargs))
        finally:
            budget.depth -= 1

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Operators can make big things out of small ones."""
        check_operator(self.budget, operator, left, right)
        result = super().call_binop(context, operator, left, right)
        if operator == "+" and isinstance(result, (list, tuple)):
            return self.budget.admit_sum(result, left, right)
        return self.budget.admit(result)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format`, after a look at its widths."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            check_braces(self.budget, value.__self__, args, kwargs)
            return str(self.budget.admit(wrapped(*args, **kwargs)))

        return bounded

    def _step(self, size: int) -> bool:
        self.budget.spend(size)
        return True

    def _concat(self, parts: Sequence[Any]) -> str:
        self.budget.weigh(parts)
        return str(self.budget.admit("".join(map(str, parts))))

    def _print(self, value: Any) -> Any:
        self.budget.spend(self.budget.weigh(value))
        return value


class _Namespace(Namespace):
    """Jinja's, less names with an underscore, and printed without its contents."""

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


def _refuse(message: object) -> NoReturn:
    raise Refused(str(message))


def _format_now(pattern: str) -> str:
    if len(pattern) > _MAX_DATE_FORMAT:
        raise BoundExceeded(f"its date format is longer than {_MAX_DATE_FORMAT} characters")
    return datetime.now().strftime(pattern)


class Guards(NodeTransformer):
    """Puts the guards in."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        """Every turn is a step, also one that the loop's condition skips."""
        self.generic_visit(node)
        node.body.insert(0, _step(0, node.lineno))
        if node.test is not None:
            passed = _filtered(nodes.Const(0), TICK, node.lineno)
            node.test = nodes.And(passed, node.test, lineno=node.lineno)
        return node

    def visit_Output(self, node: nodes.Output) -> list[nodes.Node]:  # noqa: N802
        """Text between tags counts as often as it is written."""
        self.generic_visit(node)
        size = sum(len(child.data) for child in node.nodes if isinstance(child, nodes.TemplateData))
        return [_step(size, node.lineno), node]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802
        """`a ~ b` becomes a call that knows how long the result will be."""
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return _filtered(parts, CONCAT, node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        """A slice is a copy."""
        self.generic_visit(node)
        return _filtered(node, ADMIT, node.lineno) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Expr:  # noqa: N802
        """Structures are weighed when they are made, so that none can be made that is too big to look at."""
        self.generic_visit(node)
        return _filtered(node, ADMIT, node.lineno)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:  # noqa: N802
        """As lists."""
        self.generic_visit(node)
        return _filtered(node, ADMIT, node.lineno)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:  # noqa: N802
        """As lists, but a tuple may also be the target of an assignment."""
        self.generic_visit(node)
        return _filtered(node, ADMIT, node.lineno) if node.ctx == "load" else node


def _filtered(node: nodes.Expr, name: str, lineno: int) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=lineno)


def _step(size: int, lineno: int) -> nodes.ExprStmt:
    return nodes.ExprStmt(_filtered(nodes.Const(size, lineno=lineno), TICK, lineno), lineno=lineno)


class TokenLimit(Extension):
    """Bounds the work of parsing and compiling, which no budget watches."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        """Pass tokens on until there are too many."""
        for count, token in enumerate(stream):
            if count > MAX_TOKENS:
                raise BoundExceeded(f"it has more than {MAX_TOKENS} tokens")
            yield token


class GenerationTag(Extension):
    """`{% generation %}` marks what the assistant says, for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Keep the body, drop the tag."""
        lineno = next(parser.stream).lineno
        body: Any = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)
