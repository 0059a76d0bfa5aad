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

_FILES = (
    "core.cumsum.test_cumsum",
    "core.topk.test_topk",
    "core.router_topk.test_router_topk",
    "core.subkernels.test_find_nonzero_indices",
    "core.max.test_cascaded_max",
    "core.max.test_cascaded_max_utils",
    "core.embeddings.test_rope",
    "core.embeddings.test_rope_hf",
    "core.utils.test_cross_partition_copy",
    "core.utils.test_tp_broadcast",
    "core.attention.test_attention_tkg",
)


def _is_fast(function) -> bool:
    return any(mark.name == "fast" for mark in getattr(function, "pytestmark", ()))


def _keep_fast_only(cls: type) -> type:
    """The class with its slow tests and sweeps removed; they need a cluster, not an afternoon."""
    slow = {name: None for name, member in vars(cls).items() if name.startswith("test") and not _is_fast(member)}
    return type(cls.__name__, (cls,), slow) if slow else cls


def _not_importable(error: Exception):
    """A test that says why a file of theirs has none here."""

    def test_their_file_imports():
        pytest.skip(f"theirs: {type(error).__name__}: {error}")

    return test_their_file_imports


for _file in _FILES:
    try:
        _module = importlib.import_module(f"test.integration.nkilib.{_file}")
    except (SyntaxError, NameError) as _error:
        globals()[f"test_{_file.rpartition('.')[2]}"] = _not_importable(_error)
        continue
    for _name, _member in list(vars(_module).items()):
        if getattr(_member, "__module__", None) != _module.__name__:
            continue
        if _name.startswith("Test"):
            globals()[_name] = _keep_fast_only(_member)
        elif _name.startswith("test_") and _is_fast(_member):
            globals()[_name] = _member
