"""The emulator's nki.isa and nki.language against the documentation's own stubs, read from a checkout (NEURON_SDK)."""

from __future__ import annotations

import ast
import inspect
import os

import pytest

from draft_verify.reference import emulator
from draft_verify.reference.emulator.instruction import Instruction

CHECKOUT = os.environ.get("NEURON_SDK")
if not CHECKOUT:
    pytest.skip("set NEURON_SDK to a checkout of aws-neuron/aws-neuron-sdk", allow_module_level=True)

ISA, LANGUAGE = emulator.modules()["nki.isa"], emulator.modules()["nki.language"]
TRN3 = {"nc_matmul_mx", "quantize_mx", "activate2", "exponential", "rand2"}


def stub(module: str) -> ast.Module:
    with open(f"{CHECKOUT}/nki/api/nki/{module}/__init__.py") as source:
        return ast.parse(source.read())


def functions(module: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in stub(module).body if isinstance(node, ast.FunctionDef)}


def names(module: str) -> set[str]:
    found = set()
    for node in stub(module).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            found.add(node.target.id)
        elif isinstance(node, ast.Assign):
            found.update(target.id for target in node.targets)
    return found


def parameters(node: ast.FunctionDef) -> list[tuple[str, str | None]]:
    """(name, default as written) in order."""
    defaults = [None] * (len(node.args.args) - len(node.args.defaults)) + [ast.unparse(d) for d in node.args.defaults]
    return [(argument.arg, default) for argument, default in zip(node.args.args, defaults)]


def written(default) -> str | None:
    """A default as the stubs write it."""
    if default is inspect.Parameter.empty:
        return None
    if type(default).__name__ in ("engine", "reduce_cmd", "dge_mode", "oob_mode", "matmul_perf_mode", "dma_engine"):
        return f"{type(default).__name__}.{default.name}"
    return repr(default).removeprefix("nl.")


@pytest.mark.parametrize("name", sorted(functions("isa").keys() - TRN3))
def test_an_instruction_has_the_documented_parameters_in_order_with_their_defaults(name):
    ours = getattr(ISA, name)
    signature = ours.__signature__ if isinstance(ours, Instruction) else inspect.signature(ours)
    expected = parameters(functions("isa")[name])
    actual = [(parameter.name, written(parameter.default)) for parameter in signature.parameters.values()]
    # The stub leaves one default out: the only value that hardware takes.
    expected = [(name, "-3.4028234663852886e+38" if default == "..." else default) for name, default in expected]
    assert actual == expected


@pytest.mark.parametrize("name", sorted(TRN3))
def test_what_only_trn3_has_is_refused(name):
    with pytest.raises(emulator.Refusal, match="NeuronCore-v4"):
        getattr(ISA, name)()


@pytest.mark.parametrize("module", ["isa", "language"])
def test_every_documented_name_exists(module):
    ours = vars(ISA if module == "isa" else LANGUAGE)
    assert sorted(name for name in names(module) if name not in ours and not name.startswith("_")) == []


def test_the_enumerations_have_the_documented_members_and_values():
    for node in stub("isa").body:
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Enum" for base in node.bases):
            members = {a.targets[0].id: ast.literal_eval(a.value) for a in node.body if isinstance(a, ast.Assign)}
            assert {member.name: member.value for member in getattr(ISA, node.name)} == members
