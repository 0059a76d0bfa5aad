"""Where an operation runs, and the one call that runs its kernel there."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from draft_verify import loader
from draft_verify.reference.tensors import is_torch

BACKENDS = ("auto", "reference", "emulator", "simulator", "device")
MOST_ROWS = 512  # of a launch, for kernels that unroll their rows: keeps these below 20,000 instructions
MOST_TRUNCATED_ROWS = 128  # with top-k, top-p or min-p, which take ten times as many,
MOST_TRUNCATED_IDS = 128 * 155_648  # of all rows together: the longer rows are, the fewer are searched at once
TRACING = "tracing"  # fake tensors: an operation's checks run, and its launch raises Traced
REHEARSAL = "rehearsal"  # the same, but that the emulator traces the kernel first, and may refuse it


class Traced(Exception):
    """All that can be checked without a run has been."""


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
        setting = os.environ.get("NEURON_LOGICAL_NC_CONFIG", "1")
        if setting not in ("1", "2"):
            raise ValueError(f"NEURON_LOGICAL_NC_CONFIG: got {setting!r}, expected 1 or 2")
        return int(setting)
    if lnc not in (1, 2):
        raise ValueError(f"lnc: got {lnc!r}, expected 1 or 2")
    return lnc


def rehearsal(backend: str) -> str:
    """What stands for a resolved backend where nothing is to be written. A device compiles before it runs."""
    return REHEARSAL if backend in ("emulator", "simulator") else TRACING


def launch(operation: str, *arguments: Any, backend: str, lnc: int) -> tuple:
    """Runs `kernels/<operation>.py` and returns its outputs as a tuple.

    Arguments are arrays of the backend's own kind and trace-time constants, in the kernel's order. Arrays that the
    kernel declares mutable are changed in place.
    """
    if backend == TRACING:
        raise Traced
    if backend == REHEARSAL:
        loader.kernel(operation, "emulator")[lnc].program(*arguments)
        raise Traced
    kernel = loader.kernel(operation, backend)
    if backend == "emulator":
        from draft_verify.reference import emulator

        outputs = emulator.simulate(kernel[lnc])(*arguments)
    elif backend == "simulator":
        outputs = loader.sdk(backend).simulate(kernel[lnc])(*arguments)
    else:
        outputs = _for_device(kernel, arguments)[lnc](*arguments)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def launch_by_rows(
    operation: str, *arguments: Any, batch: int, rows: int, truncated: int = 0, shared: tuple = (), **where: Any
) -> tuple:
    """`launch` for any number of sequences, of `rows` rows each: several launches where one would be too long.

    Arrays with `batch` entries are split, but those in `shared`; outputs are joined in the same order. `truncated` is
    how many ids the rows have that top-k, top-p or min-p may cut, 0 for none.
    """
    most = MOST_ROWS if truncated == 0 else min(MOST_TRUNCATED_ROWS, MOST_TRUNCATED_IDS // truncated)
    most = max(1, most // rows)
    if batch <= most:
        return launch(operation, *arguments, **where)
    whole = {id(array) for array in shared}
    parts = []
    for first in range(0, batch, most):
        own = [
            value[first : first + most]
            if getattr(value, "shape", (0,))[0] == batch and id(value) not in whole
            else value
            for value in arguments
        ]
        parts.append(launch(operation, *own, **where))
    return tuple(concatenate(outputs, 0) for outputs in zip(*parts))


def concatenate(arrays: Sequence, axis: int) -> Any:
    return (sys.modules["torch"].cat if is_torch(arrays[0]) else np.concatenate)(arrays, axis)


def _for_device(kernel: Any, arguments: tuple) -> Any:
    """XLA's tensors take the kernel as it is, a custom call in XLA's graph. Native Neuron tensors (TorchNeuron, the
    vLLM plugin) take it through the operator that their torch.compile backend lowers. UNVERIFIED: no device here.
    """
    tensors = (leaf for value in arguments for leaf in (value if isinstance(value, tuple) else (value,)))
    if next(tensor.device.type for tensor in tensors if hasattr(tensor, "device")) == "xla":
        return kernel
    for module in ("libtorch_neuronx_lite.nki.nki_hop", "torch_neuronx.nki_hop"):  # the plugin's runtime, TorchNeuron
        try:
            return importlib.import_module(module).wrap_nki(kernel)
        except ImportError:
            continue
    return kernel
