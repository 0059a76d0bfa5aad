"""Imports the kernels once per provider of `nki`, so that emulator and SDK live side by side in one process.

Kernel files are plain NKI (`import nki`). Each provider gets its own private package over the same folder; while it
is being imported, `nki` and its submodules in sys.modules are the provider's.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import draft_verify.kernels

EMULATOR = "emulator"
SDK = "sdk"
MARKER = "__draft_verify_emulator__"
_SDK_MISSING = (
    "no Neuron SDK here: backend {backend!r} needs AWS's `nki` (neuronx-cc, torch-neuronx), which come from AWS's own "
    "package index, https://pip.repos.neuron.amazonaws.com{found}. backend='emulator' runs the same kernels on a CPU."
)
_lock = threading.RLock()
_packages: dict[tuple[str, int], ModuleType] = {}


def _is_nki(name: str) -> bool:
    return name == "nki" or name.startswith("nki.")


@contextlib.contextmanager
def _in_place_of_nki(modules: dict[str, ModuleType]) -> Iterator[None]:
    """`modules` are what `import nki...` finds inside the block; what was there before comes back after it."""
    before = {name: module for name, module in sys.modules.items() if _is_nki(name)}
    for name in before:
        del sys.modules[name]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if _is_nki(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def sdk(backend: str) -> ModuleType:
    """The installed `nki`: the Neuron SDK, or whatever else is in sys.modules under that name.

    Raises RuntimeError, saying what to install, where there is none, only our emulator, or PyPI's empty placeholder.
    """
    try:
        nki = sys.modules.get("nki") or importlib.import_module("nki")
    except ImportError:
        raise RuntimeError(_SDK_MISSING.format(backend=backend, found="")) from None
    if getattr(nki, MARKER, False):
        found = " (the `nki` in sys.modules is this library's emulator)"
    elif not hasattr(nki, "jit"):
        found = " (the installed `nki` is the empty placeholder of that name on PyPI)"
    else:
        return nki
    raise RuntimeError(_SDK_MISSING.format(backend=backend, found=found))


def kernel(operation: str, backend: str) -> Callable:
    """`kernels/<operation>.py:<operation>`, imported with the backend's own `nki`."""
    with _lock:
        if backend == EMULATOR:
            from draft_verify.reference import emulator

            modules = emulator.modules()
            key = (EMULATOR, 0)
        else:
            nki = sdk(backend)
            modules = {name: module for name, module in sys.modules.items() if _is_nki(name)}
            key = (SDK, id(nki))
        if key not in _packages:
            name = f"draft_verify._kernels_{len(_packages)}"
            package = ModuleType(name, draft_verify.kernels.__doc__)
            package.__path__ = [str(Path(draft_verify.kernels.__file__).parent)]
            sys.modules[name] = package
            _packages[key] = package
        name = f"{_packages[key].__name__}.{operation}"
        if name not in sys.modules:  # every launch comes through here
            with _in_place_of_nki(modules):
                importlib.import_module(name)
    return getattr(sys.modules[name], operation)
