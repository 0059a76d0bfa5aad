"""NumPy arrays or torch tensors in, the same kind out.

A torch tensor on the CPU becomes a NumPy view of its own memory, so that in-place operations reach it; bfloat16 and
float8 go by their bits, which NumPy knows through ml_dtypes. torch is never imported here: a torch tensor can only
come from a caller who has it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import ml_dtypes
import numpy as np

from draft_verify import backends

# trn2's float8_e4m3 and torch's float8_e4m3fn share their bits up to 240, the largest value trn2 knows.
_BY_BITS = {
    "bfloat16": ("int16", ml_dtypes.bfloat16),
    "float8_e4m3fn": ("uint8", ml_dtypes.float8_e4m3),
}


def is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def on_device(array: Any) -> bool:
    return is_torch(array) and array.device.type in ("xla", "neuron", "privateuseone")


def to_numpy(array: Any) -> Any:
    """A torch CPU tensor as a NumPy view of the same memory; tuples entry by entry; anything else as it is."""
    if isinstance(array, tuple | list):
        return type(array)(to_numpy(entry) for entry in array)
    if not is_torch(array) or on_device(array):
        return array
    torch = sys.modules["torch"]
    array = array.detach()
    bits = _BY_BITS.get(str(array.dtype).removeprefix("torch."))
    if bits is None:
        return array.numpy()
    return array.view(getattr(torch, bits[0])).numpy().view(bits[1])


def to_torch(array: Any) -> Any:
    """The inverse of `to_numpy`, through named tuples and tuples."""
    if isinstance(array, tuple):
        entries = [to_torch(entry) for entry in array]
        return type(array)(*entries) if hasattr(array, "_fields") else tuple(entries)
    if not isinstance(array, np.ndarray | np.generic):
        return array
    torch = sys.modules["torch"]
    array = np.ascontiguousarray(array)
    for name, (carrier, dtype) in _BY_BITS.items():
        if array.dtype == dtype:
            return torch.from_numpy(array.view(carrier)).view(getattr(torch, name))
    return torch.from_numpy(array)


def leaves(values: Iterable[Any]) -> list[Any]:
    """The values, tuples and lists entry by entry."""
    return [leaf for value in values for leaf in (value if isinstance(value, tuple | list) else (value,))]


OPERATIONS: dict[str, Callable] = {}


def public(function: Callable) -> Callable:
    """Makes `function(..., backend=, lnc=)` a public operation.

    The body sees NumPy arrays (or device tensors), the resolved backend and the resolved number of cores.
    """
    signature = inspect.signature(function)
    OPERATIONS[function.__name__] = function

    @functools.wraps(function)
    def operation(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if any(is_torch(leaf) for leaf in leaves(bound.arguments.values())):
            from draft_verify import torch_ops  # only who has a tensor has torch

            return torch_ops.call(function.__name__, bound.arguments)
        return run(function, bound.arguments)

    return operation


def run(function: Callable, arguments: dict[str, Any]) -> Any:
    """Calls the body of a public operation with everything resolved; torch tensors out where torch tensors came in."""
    tensors = [leaf for leaf in leaves(arguments.values()) if is_torch(leaf)]
    arguments = {name: to_numpy(value) for name, value in arguments.items()}
    arguments["backend"] = backends.resolve(arguments["backend"], any(on_device(leaf) for leaf in tensors))
    arguments["lnc"] = backends.logical_cores(arguments["lnc"])
    result = function(**arguments)
    return to_torch(result) if tensors and arguments["backend"] != "device" else result
