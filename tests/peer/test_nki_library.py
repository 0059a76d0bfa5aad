"""The fast tests of aws-neuron/nki-library, collected from a checkout (NKI_LIBRARY) and run on the emulator.

Their kernels, inputs, references and tolerances; our stand-ins for the rest (standins.py). Nothing of theirs is copied.
"""

from __future__ import annotations

import importlib
import os

import pytest

from . import standins

CHECKOUT = os.environ.get("NKI_LIBRARY")
if not CHECKOUT:
    pytest.skip("set NKI_LIBRARY to a checkout of aws-neuron/nki-library", allow_module_level=True)

standins.install(os.path.abspath(CHECKOUT))

# Test files, and which of their fast cases: a regular expression where all of them would take minutes.
_FILES = {
    "core.attention.test_attention_bwd": "b-1_qh-1_",
    "core.attention.test_attention_tkg": "",
    "core.attention.test_gen_mask_tkg": "",
    "core.cumsum.test_cumsum": "",
    "core.embeddings.test_rope": "",
    "core.embeddings.test_rope_hf": "",
    "core.max.test_cascaded_max": "",
    "core.max.test_cascaded_max_utils": "",
    "core.moe.moe_cte.test_moe_cte": "SHARD_ON_BLOCK-3072-1024-8-256-4-192",
    "core.moe.moe_tkg.test_moe_tkg": r"float16.*_t-\d_h-\d{3,4}_i-\d{2,3}_e-[248]_",
    "core.output_projection.test_output_proj_cte": r"(bf16|static_fp8)_unit.*_s-(16|128|256|320)_h-\d{4}_",
    "core.output_projection.test_output_proj_tkg": "",
    "core.qkv.test_qkv_cte": r"1-1-(128|512|1000)-(512|1024)-",
    "core.qkv.test_qkv_tkg": "",
    "core.rmsnorm.test_rmsnorm_quant": r"\[(2|128|160)-",
    "core.router_topk.test_router_topk": "",
    "core.subkernels.test_find_nonzero_indices": "",
    "core.subkernels.test_indexed_flatten": "",
    "core.subkernels.test_layernorm_tkg": "",
    "core.subkernels.test_rmsnorm_tkg": "",
    "core.topk.test_topk": "",
    "core.utils.test_cross_partition_copy": "",
    "core.utils.test_tensor_view": "",
    "core.utils.test_tp_broadcast": "",
    "experimental.conv.test_conv1d": "",
    "experimental.conv.test_depthwise_conv1d": r"\[1-\d{2,4}-\d{2,3}-",
    "experimental.dynamic_shapes.test_dynamic_elementwise_add": "",
}


def _is_fast(function) -> bool:
    return any(mark.name == "fast" for mark in getattr(function, "pytestmark", ()))


def _keep_fast_only(cls: type) -> type:
    """The class with its slow tests and sweeps removed; they need a cluster, not an afternoon."""
    slow = {name: None for name, member in vars(cls).items() if name.startswith("test") and not _is_fast(member)}
    return type(cls.__name__, (cls,), slow)


def _not_importable(error: Exception):
    """A test that says why a file of theirs has none here."""

    def test_their_file_imports():
        pytest.skip(f"theirs: {type(error).__name__}: {error}")

    return test_their_file_imports


for _file, _cases in _FILES.items():
    try:
        _module = importlib.import_module(f"test.integration.nkilib.{_file}")
    except (SyntaxError, NameError) as _error:
        globals()[_file.rpartition(".")[2]] = _not_importable(_error)
        continue
    for _name, _member in list(vars(_module).items()):
        if getattr(_member, "__module__", None) != _module.__name__:
            continue
        if _name.startswith("Test"):
            globals()[_name] = _keep_fast_only(_member)
            globals()[_name].cases = _cases
        elif _name.startswith("test_") and _is_fast(_member):
            globals()[_name] = _member
            _member.cases = _cases
