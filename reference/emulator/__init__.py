"""Runs NKI kernels on a CPU: traces a kernel once per shapes, refuses what trn2 refuses, runs the program often."""

from __future__ import annotations

import sys
from types import ModuleType

from . import collectives, enums, isa, language
from .instruction import NkiValidationError, Refusal
from .launch import Kernel, jit, set_strict, simulate, trace
from .objects import NKIObject
from .program import Block, Loop, Program
from .tensor import NkiTensor, Storage

__all__ = [
    "Block",
    "Kernel",
    "Loop",
    "NKIObject",
    "NkiTensor",
    "NkiValidationError",
    "Program",
    "Refusal",
    "Storage",
    "install",
    "jit",
    "modules",
    "set_strict",
    "simulate",
    "trace",
]

MARKER = "__draft_verify_emulator__"
_modules: dict[str, ModuleType] = {}


class mutable_tensor:
    """nki.typing: annotates an argument that the kernel writes in place."""


def modules() -> dict[str, ModuleType]:
    """`nki` and its submodules by name, the same objects at every call; nothing is installed."""
    if not _modules:
        constants = {name: value for name, value in vars(enums).items() if isinstance(value, type)}
        contents = {
            "nki": {"jit": jit, "simulate": simulate, "__version__": "0.6.0"},
            "nki.language": language.EXPORTS,
            "nki.isa": isa.API,
            "nki.isa.constants": constants,
            "nki.typing": {"mutable_tensor": mutable_tensor, "tensor": NkiTensor},
            "nki.collectives": collectives.EXPORTS,
            "nki.experimental": {"while_loop": language.EXPORTS["while_loop"]},
        }
        for name, values in contents.items():
            module = _modules[name] = ModuleType(name)
            module.__path__ = []
            vars(module).update(values, **{MARKER: True})
        for name, module in _modules.items():
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(_modules[parent], child, module)
    return dict(_modules)


def install() -> None:
    """Puts the emulator into sys.modules as `nki`, so that a kernel written for the SDK runs unchanged."""
    sys.modules.update(modules())
