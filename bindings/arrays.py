"""NumPy arrays or torch tensors in, the same kind out."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from draft_verify import backends
from draft_verify.reference.tensors import is_torch, to_numpy, to_torch


def on_device(array: Any) -> bool:
    return is_torch(array) and array.device.type in ("xla", "neuron", "privateuseone")


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
        bound.arguments = {
            name: value.item() if isinstance(value, np.generic) else value for name, value in bound.arguments.items()
        }
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
