"""Where an operation runs, and the one call that runs its kernel there."""

from __future__ import annotations

import os
from typing import Any

from draft_verify import loader

BACKENDS = ("auto", "reference", "emulator", "simulator", "device")
TRACING = "tracing"  # fake tensors: an operation's checks run, and its launch raises Traced


class Traced(Exception):
    """All that can be checked without data has been; `torch_ops` knows the shapes of what comes out."""


def resolve(backend: str, on_device: bool) -> str:
    """`auto` is the device for device tensors and the reference for everything else."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, expected one of {', '.join(BACKENDS)}")
    if backend == "auto":
        return "device" if on_device else "reference"
    if on_device and backend != "device":
        raise ValueError(f"backend: got {backend!r} for tensors on a device, expected 'device' or 'auto'")
    if backend == "device" and not on_device:
        raise ValueError("backend: got 'device' for arrays on the CPU, expected tensors on a Neuron device")
    return backend


def logical_cores(lnc: int | None) -> int:
    """Physical cores that share one logical core: the argument, else NEURON_LOGICAL_NC_CONFIG, else 1."""
    if lnc is None:
        lnc = int(os.environ.get("NEURON_LOGICAL_NC_CONFIG", "1"))
    if lnc not in (1, 2):
        raise ValueError(f"lnc: got {lnc!r}, expected 1 or 2")
    return lnc


def launch(operation: str, *arguments: Any, backend: str, lnc: int) -> tuple:
    """Runs `kernels/<operation>.py` and returns its outputs as a tuple.

    Arguments are arrays of the backend's own kind and trace-time constants, in the kernel's order. Arrays that the
    kernel declares mutable are changed in place.
    """
    if backend == TRACING:
        raise Traced
    kernel = loader.kernel(operation, backend)[lnc]
    if backend == "emulator":
        from draft_verify.reference import emulator

        outputs = emulator.simulate(kernel)(*arguments)
    elif backend == "simulator":
        outputs = loader.sdk(backend).simulate(kernel)(*arguments)
    else:
        outputs = kernel(*arguments)
    return outputs if isinstance(outputs, tuple) else (outputs,)
