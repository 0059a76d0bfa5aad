"""NumPy arrays or torch tensors in, the same kind out."""

from __future__ import annotations

import contextlib
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


_FRACTIONS = {"temperature", "top_p", "min_p", "uniforms", "sinks", "key_scale", "value_scale"}
_WRITTEN = {"key_cache", "value_cache"}  # in place: these are the caller's own arrays or nothing


def numbers_in(value: Any) -> list | None:
    """The numbers in lists or tuples, nested or not; None if that is not what `value` is."""
    numbers = [value]
    while any(isinstance(number, tuple | list) for number in numbers):
        numbers = leaves(numbers)
    is_list = isinstance(value, tuple | list) and all(isinstance(number, int | float | np.number) for number in numbers)
    return numbers if is_list else None


def dtype_of(argument: str, numbers: list) -> str:
    """float32 where the argument or a number is a fraction, else int32, or int64 where a number needs it."""
    if argument in _FRACTIONS or any(isinstance(number, float | np.floating) for number in numbers):
        return "float32"
    return "int32" if all(-(2**31) <= number < 2**31 for number in numbers) else "int64"


def from_lists(argument: str, value: Any) -> Any:
    """Lists and tuples of numbers, nested or not, as the arrays they stand for; anything else as it is."""
    numbers = None if argument in _WRITTEN else numbers_in(value)
    if numbers is None:
        return value
    try:
        return np.asarray(value, dtype_of(argument, numbers))
    except (ValueError, OverflowError):
        expected = "lists of one length, of numbers that an array holds"
        raise ValueError(f"{argument}: got {value}, expected {expected}") from None


OPERATIONS: dict[str, Callable] = {}


def public(function: Callable) -> Callable:
    """Makes `function(..., backend=, lnc=)` a public operation.

    The body sees NumPy arrays (or device tensors), the resolved backend and the resolved number of cores. Lists of
    numbers count as arrays.
    """
    OPERATIONS[function.__name__] = function

    @functools.wraps(function)
    def operation(*args: Any, **kwargs: Any) -> Any:
        arguments = bound(function, args, kwargs)
        if any(is_torch(leaf) for leaf in leaves(arguments.values())):
            from draft_verify import torch_ops  # only who has a tensor has torch

            return torch_ops.call(function.__name__, arguments)
        return run(function, {name: from_lists(name, value) for name, value in arguments.items()})

    return operation


def bound(function: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, numbers as Python's."""
    arguments = inspect.signature(function).bind(*args, **kwargs)
    arguments.apply_defaults()
    return {
        name: value.item() if isinstance(value, np.generic) else value for name, value in arguments.arguments.items()
    }


def run(function: Callable, arguments: dict[str, Any]) -> Any:
    """Calls the body of a public operation with everything resolved; torch tensors out where torch tensors came in."""
    arguments, has_tensors = resolved(arguments)
    result = function(**arguments)
    return to_torch(result) if has_tensors and arguments["backend"] != "device" else result


def resolved(arguments: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Arguments as a body sees them, and whether there are torch tensors among them."""
    tensors = [leaf for leaf in leaves(arguments.values()) if is_torch(leaf)]
    arguments = {name: to_numpy(value) for name, value in arguments.items()}
    arguments["backend"] = backends.resolve(arguments["backend"], any(on_device(leaf) for leaf in tensors))
    arguments["lnc"] = backends.logical_cores(arguments["lnc"])
    return arguments, bool(tensors)


def rehearse(operation: Callable, *args: Any, **kwargs: Any) -> None:
    """Raises what `operation` would refuse of its arguments, or its kernel of their shapes, and writes nothing."""
    function = OPERATIONS[operation.__name__]
    listed = bound(function, args, kwargs).items()
    arguments, _ = resolved({name: from_lists(name, value) for name, value in listed})
    arguments["backend"] = backends.rehearsal(arguments["backend"])
    with contextlib.suppress(backends.Traced):
        function(**arguments)
