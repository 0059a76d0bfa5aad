"""The stand-ins of the default tests have the real classes' signatures, and the hooks are still there."""

import importlib
import inspect

import pytest

from tests import nxdi_standins as standins

METHODS = [
    ("NeuronAttentionBase", "compute_for_token_gen"),
    ("NeuronAttentionBase", "get_learned_sinks"),
    ("NeuronBaseModel", "_sample_on_device"),
    ("NeuronFusedSpecModel", "__init__"),
    ("NeuronFusedSpecModel", "_context_encoding_forward"),
    ("NeuronFusedSpecModel", "_token_gen_forward"),
    ("NeuronFusedSpecModel", "_cte_postprocessor"),
    ("NeuronFusedSpecModel", "_tkg_postprocessor"),
    ("NeuronBaseForCausalLM", "enable_context_encoding"),
]


def real(name):
    module = next(m for m, members in standins.MODULES.items() if name in [member.__name__ for member in members])
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name, method", METHODS)
def test_a_stand_ins_method_takes_what_the_real_one_takes(name, method):
    def parameters(cls):
        signature = inspect.signature(getattr(cls, method))
        return [(p.name, p.kind, p.default) for p in signature.parameters.values()]

    assert parameters(getattr(standins, name)) == parameters(real(name))


def test_the_functions_used_beside_the_hooks_exist():
    for module, members in standins.MODULES.items():
        for member in members:
            assert hasattr(importlib.import_module(module), member.__name__)
