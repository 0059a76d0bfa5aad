"""The layout shows the architecture: one operation, one name, the same arguments everywhere."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import draft_verify
from draft_verify import arrays, backends

ROOT = Path(__file__).resolve().parents[1]
OPERATIONS = sorted(arrays.OPERATIONS)


def parameters(function) -> list[tuple[str, object, object]]:
    skipped = ("backend", "lnc")
    return [
        (p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values() if p.name not in skipped
    ]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_reference_and_public_function_take_the_same_arguments(operation):
    found = [
        getattr(module, operation)
        for name in sorted(path.stem for path in (ROOT / "reference").glob("*.py"))
        if hasattr(module := importlib.import_module(f"draft_verify.reference.{name}"), operation)
    ]
    assert found, f"no reference for {operation}"
    assert all(parameters(function) == parameters(getattr(draft_verify, operation)) for function in found)


PUBLIC = {name: getattr(draft_verify, name) for name in draft_verify.__all__}
FUNCTIONS = {name: function for name, function in PUBLIC.items() if inspect.isfunction(function)}
with contextlib.suppress(ImportError):  # both need torch
    for module in map(importlib.import_module, ("draft_verify.parallel", "draft_verify.vllm_neuron")):
        for name, member in inspect.getmembers(module, inspect.isfunction):
            if member.__module__ == module.__name__ and not name.startswith("_"):
                FUNCTIONS[f"{module.__name__}.{name}"] = member


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_and_result_of_a_public_function_is_documented(name):
    text = inspect.getdoc(FUNCTIONS[name])
    described = text[text.index("Args:") :]
    missing = [
        entry for entry in inspect.signature(FUNCTIONS[name]).parameters if not re.search(rf"\b{entry}\b", described)
    ]
    assert not missing and "Returns:" in described
    assert "The others" not in text


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_says_what_it_refuses(name):
    assert "ValueError: " in inspect.getdoc(getattr(draft_verify, name))


def test_what_public_functions_return_is_public():
    for name, function in FUNCTIONS.items():
        returned = inspect.signature(function).return_annotation
        for word in re.findall(r"\b[A-Z]\w+", str(returned)):
            assert word in {*draft_verify.__all__, "Any", "Tensor", "None", "Windows"}, name


def test_the_package_says_what_every_operation_takes():
    for backend in backends.BACKENDS:
        assert f'"{backend}"' in draft_verify.__doc__
    assert "lnc: " in draft_verify.__doc__ and "NEURON_LOGICAL_NC_CONFIG" in draft_verify.__doc__


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "reference").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_references_import_neither_torch_nor_kernels_nor_bindings(path):
    for name in imports(path):
        assert name.split(".")[0] != "torch", name
        if name.startswith("draft_verify"):
            assert name.startswith("draft_verify.reference"), name


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").glob("*.py")), ids=lambda p: p.name)
def test_kernels_import_nothing_but_nki(path):
    outside = {name for name in imports(path) if name.split(".")[0] not in ("nki", "dataclasses", "__future__")}
    assert not outside


def test_the_library_imports_without_torch():
    code = "import sys; sys.modules['torch'] = None; import draft_verify"
    subprocess.run([sys.executable, "-c", code], check=True)
