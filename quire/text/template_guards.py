"""Rewrites a template's syntax tree so that nothing in it runs or grows unseen, and bounds the tree itself.

Jinja calls back for calls, filters and operators, but not for a turn of a loop, for text between tags, for `~`, for
slices and for literals. These get a filter of ours around them; its name has a character that no template can write.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

from quire.text.template_budget import BoundExceeded

MAX_TOKENS = 16_000
TICK, ADMIT, CONCAT = "tick!", "admit!", "concat!"


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
