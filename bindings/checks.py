"""Every check of shapes, dtypes, layouts and values, in one place: one function per operation.

All raise ValueError naming the argument, what came and what was expected, before anything is written.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

FLOATS = ("float32", "bfloat16")
FLOAT8 = "float8_e4m3"
LARGEST_FLOAT8 = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3).max)


def dtype_name(array: Any) -> str:
    """`float32`, `bfloat16`, `int32`, ... of a NumPy array or a torch tensor."""
    return str(array.dtype).removeprefix("torch.")


def expect(condition: bool, argument: str, got: Any, expected: str) -> None:
    if not condition:
        raise ValueError(f"{argument}: got {got}, expected {expected}")


def array(argument: str, value: Any, shape: tuple[int | str, ...], dtypes: tuple[str, ...]) -> None:
    """`value` is an array of the given shape, in which a string names a size that is free, and one of the dtypes."""
    expect(hasattr(value, "shape") and hasattr(value, "dtype"), argument, type(value).__name__, "an array")
    matches = len(value.shape) == len(shape) and all(
        isinstance(want, str) or have == want for have, want in zip(value.shape, shape)
    )
    expect(matches, argument, f"shape {tuple(value.shape)}", f"shape [{', '.join(map(str, shape))}]")
    expect(dtype_name(value) in dtypes, argument, f"dtype {dtype_name(value)}", " or ".join(dtypes))


def values_known(*arrays: Any) -> bool:
    """Whether values may be looked at: NumPy arrays only; a device tensor's values stay on the device."""
    return all(isinstance(value, np.ndarray) for value in arrays if value is not None)


def in_range(argument: str, value: Any, low: float, high: float, what: str) -> None:
    """Every entry lies in low..high, both included; NaN does not."""
    if not values_known(value):
        return
    inside = (value >= low) & (value <= high)
    if not inside.all():
        where = tuple(int(i) for i in np.argwhere(~inside)[0])
        raise ValueError(f"{argument}: got {value[where]} at {list(where)}, expected {what}")
