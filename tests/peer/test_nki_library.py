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

_CORE = "test.integration.nkilib.core"
_FILES = (
    "cumsum.test_cumsum",
    "topk.test_topk",
    "router_topk.test_router_topk",
    "subkernels.test_find_nonzero_indices",
    "max.test_cascaded_max",
    "max.test_cascaded_max_utils",
    "embeddings.test_rope",
    "embeddings.test_rope_hf",
    "utils.test_cross_partition_copy",
    "utils.test_tp_broadcast",
    "attention.test_attention_tkg",
)


def _is_fast(function) -> bool:
    return any(mark.name == "fast" for mark in getattr(function, "pytestmark", ()))


def _keep_fast_only(cls: type) -> type:
    """The class with its slow tests and sweeps removed; they need a cluster, not an afternoon."""
    slow = {name: None for name, member in vars(cls).items() if name.startswith("test") and not _is_fast(member)}
    return type(cls.__name__, (cls,), slow) if slow else cls


for _file in _FILES:
    _module = importlib.import_module(f"{_CORE}.{_file}")
    for _name, _member in list(vars(_module).items()):
        if getattr(_member, "__module__", None) != _module.__name__:
            continue
        if _name.startswith("Test"):
            globals()[_name] = _keep_fast_only(_member)
        elif _name.startswith("test_") and _is_fast(_member):
            globals()[_name] = _member
