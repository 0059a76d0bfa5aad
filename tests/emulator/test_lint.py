"""Every rule of the lint: a snippet it refuses, naming line, rule and text, and the corrected twin it lets pass."""

from pathlib import Path

import pytest

from draft_verify.reference.emulator.__main__ import main
from draft_verify.reference.emulator.lint import lint, lint_file

KERNELS = sorted((Path(__file__).parents[2] / "kernels").glob("*.py"))

LOOP = "nl.fori_loop(x, n, body)"

# rule, wrong body, right body of `def kernel(x, n)` with tensors a (128 x 64, SBUF) and h (8 x 16, HBM).
CASES = {
    # Row 3: accumulation groups.
    "inferred accumulate": ("accumulate", "nisa.nc_matmul(p, a, a)", "nisa.nc_matmul(p, a, a, accumulate=False)"),
    # Row 7: slices past the end.
    "slice past the end": ("slice-bounds", "f(a[:, 0:65])", "f(a[:, 0:64])"),
    "index past the end": ("slice-bounds", "f(a[128, :])", "f(a[127, :])"),
    "computed slice past the end": (
        "slice-bounds",
        "width = 32\nf(a[:, width : 3 * width])",
        "width = 32\nf(a[:, width : 2 * width])",
    ),
    # Row 15: trn3 only.
    "trn3 instruction": ("trn3-only", "nisa.exponential(dst=a, src=a)", "nisa.activation(dst=a, op=nl.exp, data=a)"),
    "trn3 operator": (
        "trn3-only",
        "nisa.tensor_tensor(a, a, a, op=nl.abs_max)",
        "nisa.tensor_tensor(a, a, a, op=nl.maximum)",
    ),
    "trn3 tensor_scalar operator": (
        "trn3-only",
        "nisa.tensor_scalar(a, a, nl.square, 0.0)",
        "nisa.activation(a, nl.square, a)",
    ),
    "trn3 dtype": ("trn3-only", "f(nl.float8_e4m3fn)", "f(nl.float8_e4m3)"),
    "trn3 priority": ("trn3-only", "nisa.dma_copy(a, h, priority=1)", "nisa.dma_copy(a, h)"),
    "trn3 view": ("trn3-only", "f(a.indirect(x))", "f(a.select(0, x))"),
    # Row 16: accumulators.
    "continued accumulator": (
        "accumulator-chain",
        "nisa.range_select(a, a, nl.less, nl.less, s, s, reduce_cmd=nisa.reduce_cmd.reduce)",
        "with nl.no_reorder():\n    nisa.range_select(a, a, nl.less, nl.less, s, s, reduce_cmd=nisa.reduce_cmd.reduce)",
    ),
    "idle accumulator read": (
        "accumulator-chain",
        "nisa.activation(a, nl.exp, a, reduce_op=nl.add, reduce_res=s, reduce_cmd=nisa.reduce_cmd.idle)",
        "nisa.activation(a, nl.exp, a, reduce_op=nl.add, reduce_res=s, reduce_cmd=nisa.reduce_cmd.reset_reduce)",
    ),
    "default reduce_cmd": (
        "reduce-cmd",
        "nisa.select_reduce(a, p, a, 0.0, reduce_res=s)",
        "nisa.select_reduce(a, p, a, 0.0, reduce_res=s, reduce_cmd=nisa.reduce_cmd.reset_reduce)",
    ),
    "default reduce_cmd of activation": (
        "reduce-cmd",
        "nisa.activation(a, nl.exp, a, reduce_res=s)",
        "nisa.activation(a, nl.exp, a)",
    ),
    # Row 22: runtime loops.
    "nested loops": (
        "loop-body",
        "def body(i):\n    nl.fori_loop(x, n, inner)\nnl.fori_loop(x, n, body)",
        "def body(i):\n    f(i)\nnl.fori_loop(x, n, body)",
    ),
    "loop in no_reorder": (
        "loop-body",
        "def body(i):\n    f(i)\nwith nl.no_reorder():\n    nl.fori_loop(x, n, body)",
        "def body(i):\n    f(i)\nnl.fori_loop(x, n, body)",
    ),
    "loop over constants": (
        "loop-body",
        "def body(i):\n    f(i)\nnl.fori_loop(0, 8, body)",
        "def body(i):\n    f(i)\nlower = nisa.register_alloc(0)\nnl.fori_loop(lower, 8, body)",
    ),
    "return from fori body": (
        "loop-body",
        "def body(i):\n    return i\nnl.fori_loop(x, n, body)",
        "def body(i):\n    f(i)\nnl.fori_loop(x, n, body)",
    ),
    "while body without condition": (
        "loop-body",
        "def body(i):\n    f(i)\nnl.while_loop(n, body)",
        "def body(i):\n    f(i)\n    return i\nnl.while_loop(n, body)",
    ),
    "arithmetic on the index": (
        "loop-body",
        "def body(i):\n    f(i + 1)\nnl.fori_loop(x, n, body)",
        "def body(i):\n    f(i)\nnl.fori_loop(x, n, body)",
    ),
    "indexing by the index": (
        "loop-body",
        "def body(i):\n    f(a[:, i])\nnl.fori_loop(x, n, body)",
        "def body(i):\n    f(a.ap([[64, 128], [1, 1]], scalar_offset=i))\nnl.fori_loop(x, n, body)",
    ),
    "value of the index": (
        "loop-body",
        "def body(i):\n    f(int(i))\nnl.fori_loop(x, n, body)",
        "def body(i):\n    nisa.register_store(s, i)\nnl.fori_loop(x, n, body)",
    ),
    "prebuilt descriptors in a loop": (
        "loop-body",
        "def body(i):\n    nisa.dma_copy(a, h, dge_mode=nisa.dge_mode.none)\nnl.fori_loop(x, n, body)",
        "def body(i):\n    nisa.dma_copy(a, h, dge_mode=nisa.dge_mode.hwdge)\nnl.fori_loop(x, n, body)",
    ),
    "collective in a loop": (
        "loop-body",
        "def body(i):\n    ncc.all_reduce([h], [h])\nnl.fori_loop(x, n, body)",
        "ncc.all_reduce([h], [h])",
    ),
    # Row 23: Python state in a body.
    "append in a body": (
        "python-state",
        "tiles = []\ndef body(i):\n    tiles.append(i)\nnl.fori_loop(x, n, body)",
        "def body(i):\n    tiles = []\n    tiles.append(i)\nnl.fori_loop(x, n, body)",
    ),
    "counter in a body": (
        "python-state",
        "count = 0\ndef body(i):\n    count += 1\nnl.fori_loop(x, n, body)",
        "def body(i):\n    count = 0\n    count += 1\nnl.fori_loop(x, n, body)",
    ),
    "dict entry in a body": (
        "python-state",
        "seen = {}\ndef body(i):\n    seen['last'] = 1\nnl.fori_loop(x, n, body)",
        "def body(i):\n    seen = {}\n    seen['last'] = 1\nnl.fori_loop(x, n, body)",
    ),
    # Row 25: tensors and globals in Python.
    "tile assignment": ("tensor-python", "x[0:4] = n", "nisa.tensor_copy(x[0:4], n)"),
    "assignment to an allocated tile": ("tensor-python", "a[0] = 1", "nisa.memset(a[0], 1.0)"),
    "arithmetic on a tile": ("tensor-python", "f(a + 1)", "nisa.tensor_scalar(a, a, nl.add, 1.0)"),
    "branch on a tile": ("tensor-python", "if a:\n    f()", "if n:\n    f()"),
    "while on a register": (
        "tensor-python",
        "r = nisa.register_alloc(1)\nwhile r:\n    f()",
        "r = nisa.register_alloc(1)\ndef body(i):\n    return i\nnl.while_loop(r, body)",
    ),
    "comparison of a tile": ("tensor-python", "f(a == 1)", "f(a.shape[0] == 1)"),
    "value of a tile": ("tensor-python", "f(int(a))", "f(int(n))"),
    "iteration over a tile": ("tensor-python", "for row in a:\n    f(row)", "for row in range(128):\n    f(a[row])"),
    "arithmetic on a register": (
        "tensor-python",
        "r = nisa.register_alloc(0)\nf(r * 2)",
        "r = nisa.register_alloc(0)\nf(r)",
    ),
    "environment": ("global-state", "f(os.environ['A'])", "f(n)"),
    "mutable global": ("global-state", "f(TABLE)", "f(SIZE)"),
    "removed range": ("removed-api", "for i in nl.affine_range(4):\n    f(i)", "for i in range(4):\n    f(i)"),
    "removed keyword": ("removed-api", "nisa.tensor_copy(a, a, mask=n)", "nisa.tensor_copy(a, a)"),
    "experimental call": ("experimental-api", "f(nl.exp(a))", "nisa.activation(a, nl.exp, a)"),
    # Row 28: order through HBM.
    "gather and scatter of one tensor": (
        "indirect-order",
        "rows = h.reshape((8, 16))\nnisa.dma_copy(a, rows.ap([[16, 8]], vector_offset=s))\nnisa.dma_copy(h, a)",
        "with nl.no_reorder():\n    nisa.dma_copy(a, h.ap([[16, 8]], vector_offset=s))\n    nisa.dma_copy(h, a)",
    ),
    "scatter over what was read": (
        "indirect-order",
        "nisa.dma_copy(a, h)\nnisa.dma_copy(h.vector_select(0, s), a)",
        "nisa.dma_copy(a, h)\nnisa.dma_copy(x.vector_select(0, s), a)",
    ),
    # Row 29: instruction names.
    "unrolled name": (
        "instruction-name",
        "for i in range(2):\n    nisa.tensor_copy(a, a, name='copy')",
        "nisa.tensor_copy(a, a, name='copy')",
    ),
    "repeated name": (
        "instruction-name",
        "nisa.tensor_copy(a, a, name='copy')\nnisa.tensor_copy(a, a, name='copy')",
        "nisa.tensor_copy(a, a, name='copy')\nnisa.tensor_copy(a, a, name='again')",
    ),
}

PYTHON = {
    "lambda": ("g = lambda v: v", "g = f"),
    "list comprehension": ("g = [v for v in x]", "g = []\nfor v in x:\n    g.append(v)"),
    "set comprehension": ("g = {v for v in x}", "g = [x]"),
    "dict comprehension": ("g = {v: v for v in x}", "g = {'v': x}"),
    "generator": ("f(v for v in x)", "f(x)"),
    "set literal": ("g = {1, 2}", "g = (1, 2)"),
    "walrus": ("f(g := 1)", "g = 1\nf(g)"),
    "yield": ("yield x", "return x"),
    "format specification": ("f(f'{n:03d}')", "f(f'{n}')"),
    "starred expression": ("f(*x)", "f(x)"),
    "matrix product": ("f(x @ n)", "f(x * n)"),
    "is": ("f(x is None)", "f(x == n)"),
    "is not": ("f(x is not None)", "f(x != n)"),
    "in": ("f(n in x)", "f(n == 1 or n == 2)"),
    "not in": ("f(n not in x)", "f(n != 1 and n != 2)"),
    "chained comparison": ("f(0 < n < 2)", "f(0 < n and n < 2)"),
    "try": ("try:\n    f()\nfinally:\n    f()", "f()"),
    "raise": ("raise ValueError", "assert n"),
    "with": ("with f():\n    f()", "with nl.no_reorder():\n    f()"),
    "with as": ("with nl.no_reorder() as r:\n    f()", "with nl.no_reorder():\n    f()"),
    "match": ("match n:\n    case 1:\n        f()", "if n == 1:\n    f()"),
    "del": ("g = 1\ndel g", "g = 1"),
    "global": ("global g\ng = 1", "g = 1"),
    "nonlocal": (f"g = 1\ndef body(i):\n    nonlocal g\n{LOOP}", f"g = 1\ndef body(i):\n    f(g)\n{LOOP}"),
    "local import": ("import math", "f(n)"),
    "nested class": ("class C:\n    pass", "f(n)"),
    "nested def": ("def g(v):\n    f(v)\ng(n)", "def g(v):\n    f(v)\nnl.fori_loop(x, n, g)"),
    "loop body called": (
        f"def body(i):\n    f(i)\n{LOOP}\nbody(n)",
        f"def body(i):\n    f(i)\n{LOOP}\nf(n)",
    ),
    "several names in a loop": ("for i, j in x:\n    f(i, j)", "for pair in x:\n    i, j = pair\n    f(i, j)"),
    "minimum of three": ("f(min(n, 2, 3))", "f(min(n, min(2, 3)))"),
    "maximum of three": ("f(max(n, 2, 3))", "f(max([n, 2, 3]))"),
    "float by another name": ("f(float('nan'))", "f(float('NaN'), float('-inf'), float(n))"),
    "for-else": ("for i in range(2):\n    f()\nelse:\n    f()", "for i in range(2):\n    f()\nf()"),
    "while-else": ("while n > 1:\n    n //= 2\nelse:\n    f()", "while n > 1:\n    n //= 2\nf()"),
    "several targets": ("g = h = []", "g = []\nh = []"),
    "dict keys": ("g = {1: n}", "g = {'1': n}"),
    "int32": ("nisa.memset(s, 4294967295)", "nisa.memset(s, 2147483647)"),
    "numpy": ("f(np.zeros(4))", "f(nl.zeros((4, 1), nl.float32))"),
    "builtin": ("f(sum(x))", "f(max(x))"),
    "method": ("x.sort()", "x.reverse()"),
    "index list": ("f(x[[0, 1]])", "f(x[0:2])"),
    "None index": ("f(x[None])", "f(x.expand_dim(0))"),
    "negative step": ("f(x[::-1])", "f(x[::2])"),
    "double star call": ("f(**x)", "f(v=x)"),
}

MODULE = {
    "star parameters": ("def f(*x): pass", "def f(x): pass"),
    "double star parameters": ("def f(**x): pass", "def f(x): pass"),
    "keyword-only parameters": ("def f(*, x): pass", "def f(x): pass"),
    "foreign decorator": ("@cache\ndef f(x): pass", "@nki.jit\ndef f(x): pass"),
    "foreign base": ("class C(Tuple): pass", "class C(NamedTuple): pass"),
    "metaclass": ("class C(metaclass=M): pass", "class C: pass"),
    "class in class": ("class C:\n    class D: pass", "class C:\n    size = 1"),
    "async": ("async def f(x): pass", "def f(x): pass"),
}


def kernel(body: str) -> str:
    """A kernel file around `body`, whose first line is line 8."""
    head = (
        "import nki\nTABLE = [1]\nSIZE = 4\n@nki.jit\ndef kernel(x, n):\n"
        "    a = nl.ndarray((128, 64), nl.float32)\n    h = nl.ndarray((8, 16), nl.float32, buffer=nl.shared_hbm)\n"
    )
    return head + "".join(f"    {line}\n" for line in body.splitlines())


@pytest.mark.parametrize("name", CASES)
def test_each_rule_refuses_its_mistake_and_nothing_else(name):
    rule, wrong, right = CASES[name]
    found = lint(kernel(wrong), "wrong.py")
    assert {finding.rule for finding in found} == {rule}
    assert found[0].line in range(8, 8 + len(wrong.splitlines()))
    assert str(found[0]).startswith(f"wrong.py:{found[0].line}: {rule}: ")
    assert found[0].text.splitlines()[0] in wrong
    assert lint(kernel(right)) == []


@pytest.mark.parametrize("name", PYTHON)
def test_python_outside_the_parsers_subset_is_refused(name):
    wrong, right = PYTHON[name]
    assert {finding.rule for finding in lint(kernel(wrong))} == {"python-subset"}
    assert lint(kernel(right)) == []


@pytest.mark.parametrize("name", MODULE)
def test_signatures_and_classes_outside_the_subset_are_refused(name):
    wrong, right = MODULE[name]
    assert {finding.rule for finding in lint(wrong)} == {"python-subset"}
    assert lint(right) == []


def test_the_retired_namespace_is_refused():
    assert [finding.rule for finding in lint("import neuronxcc.nki as nki\n")] == ["removed-api"]


def test_a_loop_inside_a_called_helper_counts_as_nested():
    helper = "def inner(x, n):\n    def step(j):\n        f(j)\n    nl.fori_loop(x, n, step)\n"
    outer = "def kernel(x, n):\n    def body(i):\n        inner(i, n)\n    nl.fori_loop(x, n, body)\n"
    assert [finding.rule for finding in lint(helper + outer)] == ["loop-body"]


def test_a_named_instruction_in_a_helper_called_twice_is_refused():
    helper = "def copy(a):\n    nisa.tensor_copy(a, a, name='copy')\n"
    assert lint(helper + "def kernel(a):\n    copy(a)\n") == []
    assert [f.rule for f in lint(helper + "def kernel(a):\n    copy(a)\n    copy(a)\n")] == ["instruction-name"]


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_our_kernels_pass_the_lint(path):
    assert [str(finding) for finding in lint_file(path)] == []


def test_the_command_line_prints_findings_and_fails(tmp_path, capsys):
    wrong, right = tmp_path / "wrong.py", tmp_path / "right.py"
    wrong.write_text("def kernel(x):\n    return [v for v in x]\n")
    right.write_text("def kernel(x):\n    return x\n")
    assert main(["lint", str(right)]) == 0
    assert capsys.readouterr().out == ""
    assert main(["lint", str(right), str(wrong)]) == 1
    assert capsys.readouterr().out.startswith(f"{wrong}:2: python-subset: list comprehension")
