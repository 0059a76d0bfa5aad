"""Reading Python syntax trees of kernels: names, arguments, integers known without running anything."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator


def dotted(node: ast.AST | None) -> str:
    """The whole name of `nisa.reduce_cmd.reduce`, "" for anything but names and attributes."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def last(node: ast.AST | None) -> str:
    """The last part of a name, also behind a call: `ap` of `t.reshape(s).ap`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def root(node: ast.AST | None) -> str:
    """The variable that an expression of views starts from: `t` of `t.reshape(s)[0]`."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def argument(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """The argument of a call, by keyword or by position."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    return call.args[position] if position is not None and position < len(call.args) else None


def calls(node: ast.AST) -> Iterator[ast.Call]:
    """Every call at or below a node."""
    return (inner for inner in ast.walk(node) if isinstance(inner, ast.Call))


def assignments(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Every `name = value` at or below a node."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assign) and isinstance(inner.targets[0], ast.Name):
            yield inner.targets[0].id, inner.value


def constants(node: ast.AST, outer: dict[str, int]) -> dict[str, int]:
    """Names bound once below a node, to an integer that can be told here, and those of `outer` that it leaves alone."""
    stores = Counter(
        inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
    )
    known = {name: value for name, value in outer.items() if name not in stores}
    for name, value in assignments(node):
        number = integer(value, known)
        if stores[name] == 1 and number is not None:
            known[name] = number
    return known


def integer(node: ast.AST | None, known: dict[str, int]) -> int | None:
    """Value of an integer expression over known names, None if it cannot be told."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = integer(node.operand, known)
        return None if value is None else -value
    if isinstance(node, ast.BinOp):
        left, right = integer(node.left, known), integer(node.right, known)
        if left is not None and right is not None:
            if isinstance(node.op, ast.Add):
                return left + right
            if isinstance(node.op, ast.Sub):
                return left - right
            if isinstance(node.op, ast.Mult):
                return left * right
            if isinstance(node.op, ast.FloorDiv) and right:
                return left // right
    return None
