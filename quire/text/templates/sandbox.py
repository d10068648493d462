"""Sandbox: the Jinja environment of chat templates, which is Jinja's sandbox with a RenderBudget.

`parse_guarded` rewrites the syntax tree of a template, because Jinja has hooks for calls, filters and operators, but
none for loop iterations, literal text, `~`, slices and literals. GuardTransformer applies internal filters to these;
their names contain a character that a template cannot write.

An environment serves one rendering at a time, so its budget needs no lock. Creating an environment takes longer than a
rendering, so `ChatTemplate` reuses them.
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

from quire.text.templates.budget import BoundExceeded, RenderBudget
from quire.text.templates.filters import bounded_filters, check_braces, check_method, check_operator

MAX_TOKENS = 16_000
SPEND, CHECK_VALUE, CONCAT = "spend!", "check_value!", "concat!"
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


class RaisedByTemplate(jinja2.TemplateError):
    """The template called `raise_exception`."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Gives access to the conversation only, and checks the budget before each operation that may be expensive."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def __init__(self, budget: RenderBudget) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[TokenLimit, GenerationTag, loopcontrols],
            optimized=False,  # constant folding would run template code at compile time, without a budget
            finalize=pass_context(lambda context, value: self._finalize(value)),
            cache_size=0,
        )
        self.budget = budget
        self.filters = bounded_filters(budget)
        self.filters |= {SPEND: self._spend, CHECK_VALUE: budget.check_value, CONCAT: self._concat}
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
            args = check_method(budget, owner, getattr(__obj, "__name__", ""), args)
        elif isinstance(__obj, Macro):
            budget.measure_all((*args, *kwargs.values()))
        budget.enter_call()
        try:
            return budget.check_value(super().call(__context, __obj, *args, **kwargs))
        finally:
            budget.depth -= 1

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Check an operator, because its result can be much larger than its operands."""
        check_operator(self.budget, operator, left, right)
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
            check_braces(self.budget, value.__self__, args, kwargs)
            return str(self.budget.check_value(wrapped(*args, **kwargs)))

        return bounded

    def _spend(self, size: int) -> bool:
        self.budget.spend(size)
        return True

    def _concat(self, parts: Sequence[Any]) -> str:
        self.budget.measure(parts)
        return str(self.budget.check_value("".join(map(str, parts))))

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


class GuardTransformer(NodeTransformer):
    """Inserts the guards into a syntax tree."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        """Count each iteration, also those that the loop's condition skips."""
        self.generic_visit(node)
        node.body.insert(0, _spend_statement(0, node.lineno))
        if node.test is not None:
            passed = _apply_filter(nodes.Const(0), SPEND, node.lineno)
            node.test = nodes.And(passed, node.test, lineno=node.lineno)
        return node

    def visit_Output(self, node: nodes.Output) -> list[nodes.Node]:  # noqa: N802
        """Count literal text each time it is output."""
        self.generic_visit(node)
        size = sum(len(child.data) for child in node.nodes if isinstance(child, nodes.TemplateData))
        return [_spend_statement(size, node.lineno), node]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802
        """Replace `a ~ b` by a filter that checks the length of the result."""
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return _apply_filter(parts, CONCAT, node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        """Check slices, which are copies."""
        self.generic_visit(node)
        return _apply_filter(node, CHECK_VALUE, node.lineno) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Expr:  # noqa: N802
        """Check the size of a list when it is created."""
        self.generic_visit(node)
        return _apply_filter(node, CHECK_VALUE, node.lineno)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:  # noqa: N802
        """Check the size of a dict when it is created."""
        self.generic_visit(node)
        return _apply_filter(node, CHECK_VALUE, node.lineno)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:  # noqa: N802
        """Check the size of a tuple when it is created, unless it is the target of an assignment."""
        self.generic_visit(node)
        return _apply_filter(node, CHECK_VALUE, node.lineno) if node.ctx == "load" else node


def _apply_filter(node: nodes.Expr, name: str, lineno: int) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=lineno)


def _spend_statement(size: int, lineno: int) -> nodes.ExprStmt:
    return nodes.ExprStmt(_apply_filter(nodes.Const(size, lineno=lineno), SPEND, lineno), lineno=lineno)


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
