"""Lint of kernel source: the mistakes that a traced program can no longer show.

A loop body is traced once, so Python state changed in it is lost; the scheduler may slip other work between an
accumulator and its continuation; a constant instruction name repeats when a helper is unrolled. Each rule is a row of
what passes in a simulator and fails on hardware, from the `nki.isa` docstrings, the migration guide and the release
notes (aws-neuron-sdk 2.32). Where types decide, a rule speaks only when the syntax alone proves the mistake.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from . import python_subset
from .python_subset import is_no_reorder
from .syntax import argument, assignments, calls, constants, dotted, integer, last, root

TRN3_ONLY = {"activate2", "exponential", "rand2", "nc_matmul_mx", "quantize_mx", "abs_max", "abs_min", "indirect"}
TRN3_DTYPES = {"float8_e4m3fn", "float8_e8m0fnu", "float8_e5m2_x4", "float8_e4m3fn_x4", "float4_e2m1fn_x4"}
TRN3_TENSOR_SCALAR_OPERATORS = {"square", "relu"}
TENSOR_SCALARS = {"tensor_scalar", "tensor_scalar_reduce", "tensor_scalar_cumulative", "scalar_tensor_tensor"}
OLD_RANGES = {"affine_range", "sequential_range", "static_range", "dynamic_range"}
REMOVED = {"arange", "mgrid", "par_dim", "tensor_copy_dynamic_src", "tensor_copy_dynamic_dst", "psum_fmax"} | OLD_RANGES
REMOVED_KEYWORDS = {"mask", "dst_rmw_op", "use_gpsimd_dma"}
ALLOCATIONS = {"ndarray", "zeros", "ones", "full", "zeros_like", "empty_like", "shared_identity_matrix"}
DYNAMIC_LOOPS = {"fori_loop", "while_loop"}
GRID = {"program_id", "num_programs", "program_ndim"}
STABLE_CALLS = ALLOCATIONS | DYNAMIC_LOOPS | GRID | {"ds", "no_reorder", "shared_constant", "copy", "device_print"}
ACCUMULATING = {"tensor_scalar_reduce", "tensor_scalar_cumulative", "select_reduce", "range_select"}
COLLECTIVES = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute", "all_gather_v"}
DMA_CALLS = {"dma_copy", "dma_transpose", "dma_compute"}
MUTATING_METHODS = {"append", "clear", "extend", "pop", "remove", "reverse", "setdefault", "insert", "update", "sort"}

STATE = "Python state changed in a body that is traced once"
PYTHON_VALUE = "a tensor or register has no value in Python"

Check = Iterator[tuple[ast.AST, str, str]]


class Finding(NamedTuple):
    """One refused piece of source."""

    file: str
    line: int
    rule: str
    message: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.message}: {self.text}"


def lint_file(path: str | Path) -> list[Finding]:
    """Findings in the kernel file at `path`, in line order."""
    return lint(Path(path).read_text(), str(path))


def lint(source: str, file: str = "<kernel>") -> list[Finding]:
    """Findings in kernel `source`, in line order; `file` names it in the messages."""
    found = []
    for node, rule, message in _Module(ast.parse(source)).check():
        lines = (ast.get_source_segment(source, node) or "").splitlines()
        found.append(Finding(file, node.lineno, rule, message, lines[0] if lines else ""))
    return sorted(set(found), key=lambda finding: finding.line)


class _Module:
    """What the functions of one file know of each other."""

    def __init__(self, tree: ast.Module):
        self.tree = tree
        self.functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        module_level = ast.Module([node for node in tree.body if isinstance(node, ast.Assign)], [])
        self.constants = constants(module_level, {})
        containers = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
        self.mutable = {name for name, value in assignments(module_level) if isinstance(value, containers)}
        self.looping = self._callers(lambda call: last(call.func) in DYNAMIC_LOOPS)

    def _callers(self, direct: Callable[[ast.Call], bool]) -> set[str]:
        """Functions of this file that make such a call, themselves or through others."""
        found: set[str] = set()
        while True:
            more = {
                name
                for name, node in self.functions.items()
                if any(direct(call) or dotted(call.func) in found for call in calls(node))
            }
            if more == found:
                return found
            found = more

    def check(self) -> Check:
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)) and "neuronxcc" in ast.unparse(node):
                yield node, "removed-api", "neuronxcc.nki is a compile error since NKI 0.4"
        for node in self.tree.body:
            if isinstance(node, ast.AsyncFunctionDef):
                yield node, "python-subset", "async is not part of the kernel language"
            if isinstance(node, ast.ClassDef):
                for found, message in python_subset.check_class(node):
                    yield found, "python-subset", message
            for function in node.body if isinstance(node, ast.ClassDef) else [node]:
                if isinstance(function, ast.FunctionDef):
                    yield from _Function(self, function).check()
                elif isinstance(function, ast.ClassDef) and function is not node:
                    yield function, "python-subset", "nested class is not part of the kernel language"
        yield from self._instruction_names()

    def _instruction_names(self) -> Check:
        """A constant name must stay unique after unrolling and after every call of its function."""
        named = [(call, argument(call, "name").value) for call in calls(self.tree) if _constant_name(call)]
        uses = Counter(name for _, name in named)
        unrolled = {id(call): call for loop in ast.walk(self.tree) if isinstance(loop, ast.For) for call in calls(loop)}
        called = Counter(dotted(call.func) for call in calls(self.tree))
        called.update(dotted(call.func) for call in unrolled.values())
        owner = {id(call): name for name, node in self.functions.items() for call in calls(node)}
        for call, name in named:
            if uses[name] > 1 or id(call) in unrolled or called[owner.get(id(call), "")] > 1:
                yield call, "instruction-name", f'more than one instruction gets the name "{name}"'


def _constant_name(call: ast.Call) -> bool:
    name = argument(call, "name")
    return isinstance(name, ast.Constant) and bool(name.value)


class _Function:
    """Rules inside one function: its statements, and the bodies of its runtime loops."""

    def __init__(self, module: _Module, function: ast.FunctionDef):
        self.module, self.function = module, function
        parameters = {parameter.arg for parameter in ast.walk(function) if isinstance(parameter, ast.arg)}
        outer = {name: value for name, value in module.constants.items() if name not in parameters}
        self.constants = constants(function, outer)
        values = dict(assignments(function))
        made = {name: value for name, value in values.items() if isinstance(value, ast.Call)}
        allocated = {name: value for name, value in made.items() if last(value.func) in ALLOCATIONS}
        self.shapes = {name: argument(value, "shape", 0) for name, value in allocated.items()}
        self.registers = {name for name, value in made.items() if last(value.func) == "register_alloc"}
        self.opaque = self.registers | set(allocated)
        self.on_chip = {name for name, value in allocated.items() if "hbm" not in ast.unparse(value)}
        self.views = {name: root(value) for name, value in values.items() if name not in allocated}
        self.ordered = {id(call) for node in ast.walk(function) if is_no_reorder(node) for call in calls(node)}
        self.bodies: dict[str, str] = {}
        for call in calls(function):
            if last(call.func) in DYNAMIC_LOOPS:
                body = argument(call, "body_fun", 2 if last(call.func) == "fori_loop" else 1)
                self.bodies[dotted(body)] = last(call.func)

    def check(self) -> Check:
        for node, message in python_subset.check_signature(self.function):
            yield node, "python-subset", message
        for statement in self.function.body:
            for node, message in python_subset.check_statement(statement, self.constants, set(self.module.functions)):
                yield node, "python-subset", message
            for node in ast.walk(statement):
                yield from self._node(node)
        for body in ast.walk(self.function):
            if isinstance(body, ast.FunctionDef) and body is not self.function:
                if body.name in self.bodies and body in self.function.body:
                    yield from self._loop_body(body, self.bodies[body.name])
                else:
                    yield (
                        body,
                        "python-subset",
                        "a nested def is the body of a runtime loop, at the top of its function",
                    )
        for call in calls(self.function):
            if dotted(call.func) in self.bodies:
                yield call, "python-subset", "the body of a runtime loop is no function to call"
        yield from self._indirect_order()

    def _node(self, node: ast.AST) -> Check:
        if isinstance(node, ast.Call):
            yield from self._call(node)
        if isinstance(node, ast.Subscript):
            yield from self._bounds(node)
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Subscript) and (_is_tile_index(target.slice) or root(target) in self.opaque):
                    yield target, "tensor-python", "a tile cannot be updated by assignment"
        operands = {
            ast.BinOp: lambda: (node.left, node.right),
            ast.Compare: lambda: (node.left, *node.comparators),
            ast.AugAssign: lambda: (node.target, node.value),
            ast.If: lambda: (node.test,),
            ast.IfExp: lambda: (node.test,),
            ast.While: lambda: (node.test,),
            ast.For: lambda: (node.iter,),
        }.get(type(node), tuple)()
        if any(dotted(operand) in self.opaque for operand in operands):
            yield node, "tensor-python", PYTHON_VALUE
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in self.module.mutable:
            yield node, "global-state", "a mutable global goes stale in the compile cache"
        if isinstance(node, ast.Attribute):
            if dotted(node) in ("os.environ", "os.getenv"):
                yield node, "global-state", "an environment read goes stale in the compile cache"
            if node.attr in TRN3_DTYPES:
                yield node, "trn3-only", f"{node.attr} is a dtype of trn3"
            if node.attr in REMOVED:
                yield node, "removed-api", f"{node.attr} is removed or deprecated"
        if is_no_reorder(node):
            for call in calls(node):
                if self._runs_loop(call):
                    yield call, "loop-body", "a runtime loop inside no_reorder"

    def _runs_loop(self, call: ast.Call) -> bool:
        return last(call.func) in DYNAMIC_LOOPS or dotted(call.func) in self.module.looping

    def _bounds(self, node: ast.Subscript) -> Check:
        shape = self.shapes.get(dotted(node.value))
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if not isinstance(shape, ast.Tuple) or any(_is_ellipsis(index) for index in indices):
            return
        for index, size in zip(indices, shape.elts):
            bound = integer(size, self.constants)
            end = integer(index.upper if isinstance(index, ast.Slice) else index, self.constants)
            if bound is not None and end is not None and end > bound - (not isinstance(index, ast.Slice)):
                yield node, "slice-bounds", f"index {end} is past the end, {bound}, where the parser would clip it"

    def _call(self, node: ast.Call) -> Check:
        called = last(node.func)
        if dotted(node.func).startswith("nl.") and called not in STABLE_CALLS | REMOVED | TRN3_ONLY:
            yield node, "experimental-api", f"nl.{called} is experimental; use nki.isa"
        if called in python_subset.BUILTINS and any(dotted(value) in self.opaque for value in node.args):
            yield node, "tensor-python", PYTHON_VALUE
        for keyword in node.keywords:
            if keyword.arg in REMOVED_KEYWORDS:
                yield node, "removed-api", f"{keyword.arg}= is removed"
        if called in TRN3_ONLY:
            yield node, "trn3-only", f"{called} exists on trn3 only"
        if called in DMA_CALLS and argument(node, "priority"):
            yield node, "trn3-only", "DMA priorities exist on trn3 only"
        for value in [*node.args, *(keyword.value for keyword in node.keywords)]:
            operator = last(value)
            if operator in TRN3_ONLY or (called in TENSOR_SCALARS and operator in TRN3_TENSOR_SCALAR_OPERATORS):
                yield node, "trn3-only", f"operator {operator} of {called} exists on trn3 only"
        if called == "nc_matmul" and not argument(node, "is_transpose", 5) and not argument(node, "accumulate", 6):
            yield node, "accumulate", "pass accumulate=: what the compiler infers depends on its version"
        if called in ACCUMULATING or called == "activation":
            yield from self._accumulator(node, called)
        if called == "fori_loop":
            bounds = [argument(node, "lower", 0), argument(node, "upper", 1)]
            if all(isinstance(b, ast.BinOp) or integer(b, self.constants) is not None for b in bounds):
                yield node, "loop-body", "make a bound a register, or the index is none under NKI 0.7"

    def _accumulator(self, node: ast.Call, called: str) -> Check:
        command = last(argument(node, "reduce_cmd"))
        result = argument(node, "reduce_res")
        if not command and (called in ACCUMULATING or result or argument(node, "reduce_op")):
            yield node, "reduce-cmd", "pass reduce_cmd=: its default moved between releases"
        if command == "reduce" and id(node) not in self.ordered:
            yield node, "accumulator-chain", "an accumulator is continued only inside nl.no_reorder()"
        if command == "idle" and result:
            yield node, "accumulator-chain", "reduce_res with reduce_cmd.idle holds what an earlier instruction left"

    def _loop_body(self, body: ast.FunctionDef, loop: str) -> Check:
        """Traced once and run many times: nothing of Python may differ between iterations."""
        index = {parameter.arg for parameter in body.args.args}
        nodes = [node for statement in body.body for node in ast.walk(statement)]
        stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        updated = {dotted(node.target) for node in nodes if isinstance(node, ast.AugAssign)}
        local = index | stored - (updated - {name for name, _ in assignments(body)})
        returns = [node for node in nodes if isinstance(node, ast.Return)]
        if loop == "fori_loop":
            for node in returns:
                yield node, "loop-body", "the body of fori_loop returns nothing"
        elif not (len(returns) == 1 and body.body[-1] is returns[0] and returns[0].value):
            yield body, "loop-body", "the body of while_loop ends in its only return, of the condition register"
        for node in nodes:
            if isinstance(node, (ast.BinOp, ast.Compare)) and index & {dotted(n) for n in ast.iter_child_nodes(node)}:
                yield node, "loop-body", "Python arithmetic on a loop register"
            if isinstance(node, ast.Subscript) and index & {dotted(n) for n in ast.walk(node.slice)}:
                yield node, "loop-body", "a loop register is no Python index; use .ap(scalar_offset=)"
            if isinstance(node, ast.AugAssign) and root(node.target) not in local:
                yield node, "python-state", STATE
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, (ast.Subscript, ast.Attribute)) and root(target) not in local:
                        yield node, "python-state", STATE
            if isinstance(node, ast.Call):
                yield from self._call_in_body(node, index, local)

    def _call_in_body(self, node: ast.Call, index: set[str], local: set[str]) -> Check:
        called = last(node.func)
        if self._runs_loop(node):
            yield node, "loop-body", "a runtime loop inside the body of another"
        if called in COLLECTIVES:
            yield node, "loop-body", "a collective inside a runtime loop"
        if called in DMA_CALLS and last(argument(node, "dge_mode")) == "none":
            yield node, "loop-body", "a DMA with prebuilt descriptors inside a runtime loop"
        if called in python_subset.BUILTINS and index & {dotted(value) for value in node.args}:
            yield node, "loop-body", "a loop register has no value in Python"
        if isinstance(node.func, ast.Attribute) and called in MUTATING_METHODS and root(node.func) not in local:
            yield node, "python-state", STATE

    def _indirect_order(self) -> Check:
        """A tensor in HBM read and written by DMA, one side through indices: only no_reorder keeps the order."""
        reads: dict[str, bool] = {}
        writes: dict[str, list[ast.Call]] = {}
        for call in calls(self.function):
            if last(call.func) in DMA_CALLS and id(call) not in self.ordered:
                source, target = argument(call, "src", 1), argument(call, "dst", 0)
                reads[self._storage(source)] = reads.get(self._storage(source), False) or _is_indirect(source)
                writes.setdefault(self._storage(target), []).append(call)
        for name, written in writes.items():
            if name and name in reads and name not in self.on_chip:
                for call in written:
                    if reads[name] or _is_indirect(argument(call, "dst", 0)):
                        yield call, "indirect-order", f"{name} is read and written through indices outside no_reorder"

    def _storage(self, node: ast.AST | None) -> str:
        name, seen = root(node), set()
        while self.views.get(name) and name not in seen:
            seen.add(name)
            name = self.views[name]
        return name


def _is_tile_index(index: ast.AST) -> bool:
    return isinstance(index, (ast.Slice, ast.Tuple)) or _is_ellipsis(index)


def _is_ellipsis(index: ast.AST) -> bool:
    return isinstance(index, ast.Constant) and index.value is Ellipsis


def _is_indirect(operand: ast.AST | None) -> bool:
    return operand is not None and any(
        argument(call, "vector_offset") is not None or last(call.func) == "vector_select" for call in calls(operand)
    )
