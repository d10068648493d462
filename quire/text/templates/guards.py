"""GuardTransformer: adds calls of the sandbox's checks to the syntax tree of a chat template.

Jinja has hooks for calls, filters and operators, but none for loop iterations, literal text, `~`, slices and literals.
GuardTransformer applies filters to these. `Sandbox` defines the filters; a template cannot write their names.
"""

from __future__ import annotations

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

SPEND, CHECK_VALUE, CONCAT = "spend!", "check_value!", "concat!"


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
        operands = nodes.List(node.nodes, lineno=node.lineno)
        return _apply_filter(operands, CONCAT, node.lineno)

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
