"""The Python that the parser frontend of NKI 0.6 understands, as a lint.

Sources: the NKI migration guide and release notes (aws-neuron-sdk 2.32) and the open parser leanprover/KLR. NKI 0.7
traces full Python; a kernel for both stays inside. Every check yields the node and a message.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator

from .syntax import dotted, integer, last

INT32_MAX = 2**31 - 1

NODES = {
    ast.Lambda: "lambda",
    ast.ListComp: "list comprehension",
    ast.SetComp: "set comprehension",
    ast.DictComp: "dict comprehension",
    ast.GeneratorExp: "generator expression",
    ast.Set: "set literal",
    ast.Await: "await",
    ast.NamedExpr: "walrus",
    ast.Yield: "yield",
    ast.YieldFrom: "yield from",
    ast.Starred: "starred expression",
    ast.Try: "try",
    ast.Raise: "raise",
    ast.Match: "match",
    ast.Delete: "del",
    ast.Global: "global",
    ast.Nonlocal: "nonlocal",
    ast.Import: "import inside a function",
    ast.ImportFrom: "import inside a function",
    ast.AsyncFunctionDef: "async",
    ast.AsyncFor: "async",
    ast.AsyncWith: "async",
    ast.ClassDef: "class inside a function or class",
}
NODES |= {getattr(ast, name): name for name in ("TryStar", "TypeAlias") if hasattr(ast, name)}  # since 3.11 and 3.12
OPERATORS = {
    ast.MatMult: "operator @",
    ast.Is: "operator is",
    ast.IsNot: "operator is not",
    ast.In: "operator in",
    ast.NotIn: "operator not in",
}
BUILTINS = set(
    "abs bool dict divmod float int isinstance len list max min print range slice str tuple type".split()  # noqa: SIM905
)
METHODS = set(
    "append clear copy count extend index pop remove reverse get items keys values setdefault".split()  # noqa: SIM905
)
OTHER_BUILTINS = {name for name in dir(builtins) if name[0].islower()} - BUILTINS
OTHER_METHODS = {name for kind in (list, dict, str, set) for name in dir(kind) if name[0] != "_"} - METHODS
FLOAT_NAMES = {"NaN", "inf", "-inf"}
CLASS_BASES = {"NKIObject", "Enum", "IntEnum", "NamedTuple"}
DECORATORS = {"staticmethod", "dataclass", "dataclasses.dataclass", "nki.jit"}

Check = Iterator[tuple[ast.AST, str]]


def check_statement(statement: ast.stmt, known: dict[str, int], functions: set[str]) -> Check:
    """Refused Python in one statement of a kernel; `known` integers, `functions` defined in the same file."""
    for node in ast.walk(statement):
        for what in [NODES.get(type(node)), *(OPERATORS.get(type(kind)) for kind in _operators(node))]:
            if what:
                yield node, f"{what} is not part of the kernel language"
        yield from _expression(node, known, functions)


def _operators(node: ast.AST) -> list[ast.AST]:
    return node.ops if isinstance(node, ast.Compare) else [node.op] if isinstance(node, ast.BinOp) else []


def _expression(node: ast.AST, known: dict[str, int], functions: set[str]) -> Check:
    if isinstance(node, ast.FormattedValue) and node.format_spec:
        yield node, "a format specification is not part of the kernel language"
    if isinstance(node, ast.For) and not isinstance(node.target, ast.Name):
        yield node, "the target of a loop is one name; unpack it inside"
    if isinstance(node, (ast.For, ast.While)) and node.orelse:
        yield node, "else after a loop is not part of the kernel language"
    if isinstance(node, ast.Assign) and len(node.targets) > 1:
        yield node, "several assignment targets are not part of the kernel language"
    if isinstance(node, ast.Compare) and len(node.ops) > 1:
        yield node, "a chained comparison is not part of the kernel language"
    if isinstance(node, ast.Dict):
        for key in node.keys:
            if key is None or (isinstance(key, ast.Constant) and not isinstance(key.value, str)):
                yield node, "dict keys are strings"
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value > INT32_MAX:
        yield node, "an integer literal must fit int32"
    if isinstance(node, ast.Name) and node.id in ("np", "numpy"):
        yield node, "NumPy has no meaning inside a kernel"
    if isinstance(node, ast.With) and not (is_no_reorder(node) and _is_bare(node)):
        yield node, "with is allowed as a bare `with nl.no_reorder()` only"
    if isinstance(node, ast.Subscript):
        yield from _index(node, known)
    if isinstance(node, ast.Call):
        if any(keyword.arg is None for keyword in node.keywords):
            yield node, "** in a call is not part of the kernel language"
        if dotted(node.func) in ("min", "max") and len(node.args) > 2:
            yield node, "min and max take two values, or one list or tuple"
        name = getattr(node.args[0], "value", None) if dotted(node.func) == "float" and node.args else None
        if isinstance(name, str) and name not in FLOAT_NAMES:
            yield node, f"float() knows {', '.join(sorted(FLOAT_NAMES))} by name only"
        if isinstance(node.func, ast.Name) and node.func.id in OTHER_BUILTINS - functions:
            yield node, f"builtin {node.func.id} is not part of the kernel language"
        if isinstance(node.func, ast.Attribute) and last(node.func) in OTHER_METHODS and not is_api(node.func):
            yield node, f"method {last(node.func)} is not part of the kernel language"


def _index(node: ast.Subscript, known: dict[str, int]) -> Check:
    for index in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
        if isinstance(index, ast.List):
            yield node, "an index list is no index of a tensor"
        if isinstance(index, ast.Constant) and index.value is None:
            yield node, "None is no index of a tensor; use expand_dim"
        if isinstance(index, ast.Slice) and (integer(index.step, known) or 1) < 0:
            yield node, "a negative step is no view of a tensor"


def check_signature(function: ast.FunctionDef) -> Check:
    """Refused parameters and decorators of a function."""
    arguments = function.args
    for parameter in (arguments.vararg, arguments.kwarg, *arguments.kwonlyargs):
        if parameter:
            yield parameter, "*args, **kwargs and keyword-only parameters are not part of the kernel language"
    if getattr(function, "type_params", None):
        yield function, "generics are not part of the kernel language"
    yield from _decorators(function)


def check_class(node: ast.ClassDef) -> Check:
    """Refused bases, decorators and keywords of a class at module level."""
    for base in node.bases:
        if last(base) not in CLASS_BASES:
            yield base, f"a class of a kernel derives from {', '.join(sorted(CLASS_BASES))} only"
    if node.keywords or getattr(node, "type_params", None):
        yield node, "class keywords and generics are not part of the kernel language"
    yield from _decorators(node)


def _decorators(node: ast.ClassDef | ast.FunctionDef) -> Check:
    for decorator in node.decorator_list:
        if dotted(getattr(decorator, "func", decorator)) not in DECORATORS:
            yield decorator, f"decorators are {', '.join(sorted(DECORATORS))} only"


def is_no_reorder(node: ast.AST) -> bool:
    """Whether this is the one `with` that kernels may use."""
    return isinstance(node, ast.With) and all(
        last(getattr(item.context_expr, "func", item.context_expr)) == "no_reorder" for item in node.items
    )


def _is_bare(node: ast.With) -> bool:
    return not any(getattr(item.context_expr, "args", ()) or item.optional_vars for item in node.items)


def is_api(node: ast.AST) -> bool:
    """Whether a name belongs to the NKI modules rather than to a Python object."""
    return dotted(node).startswith(("nl.", "nisa.", "nki."))
