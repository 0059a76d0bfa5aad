"""The nki.isa module of the emulator: every instruction, the enumerations, and refusals for what trn2 does not have."""

from __future__ import annotations

from . import (
    control,
    enums,
    isa_gpsimd,
    isa_movement,
    isa_random,
    isa_scalar,
    isa_select,
    isa_tensor,
    isa_vector,
)
from .enums import engine
from .instruction import Instruction, NkiInstruction, NkiValidationError, Refusal
from .opaque import VirtualRegister

_DESCRIPTIONS = (control, isa_movement, isa_tensor, isa_vector, isa_select, isa_scalar, isa_gpsimd, isa_random)
_ENUMS = ("engine", "reduce_cmd", "dge_mode", "oob_mode", "matmul_perf_mode", "nc_version", "dma_engine")
_CONTROL = ("register_alloc", "get_nc_version", "get_nc_sub_version")
_TRN3 = "available on NeuronCore-v4 (trn3) and newer only"
_LATER = "new in NKI 0.7: kernels stay in what 0.6 and 0.7 share"
_MISSING = {
    **dict.fromkeys(("nc_matmul_mx", "quantize_mx", "activate2", "exponential", "rand2"), _TRN3),
    **dict.fromkeys(("scalar_load", "scalar_store"), _LATER),
}


def _refuse(name: str, why: str):
    def missing(*args, **kwargs):
        raise Refusal(f"nisa.{name}: {why}")

    missing.__name__ = name
    missing.__doc__ = why
    return missing


INSTRUCTIONS: dict[str, Instruction] = {
    name: value for module in _DESCRIPTIONS for name, value in vars(module).items() if isinstance(value, Instruction)
}

API = {
    **INSTRUCTIONS,
    **{name: getattr(enums, name) for name in _ENUMS},
    **{name: getattr(control, name) for name in _CONTROL},
    **{name: _refuse(name, why) for name, why in _MISSING.items()},
    "NkiInstruction": NkiInstruction,
    "NkiValidationError": NkiValidationError,
    "VirtualRegister": VirtualRegister,
    # Deprecated spellings that the stubs still list.
    **{f"{member.name}_engine": member for member in engine if member.name in ("tensor", "vector", "scalar", "gpsimd")},
    "unknown_engine": engine.unknown,
}

globals().update(API)
__all__ = list(API)
