"""What every check is made of: one array, one number, or the values of an array."""

from __future__ import annotations

from typing import Any

import numpy as np

FLOAT32_MAX = float(np.finfo(np.float32).max)
FLOATS = ("float32", "bfloat16")
FLOAT8 = "float8_e4m3"
ITEMSIZES = {"float32": 4, "bfloat16": 2, FLOAT8: 1}
FLOAT8_KINDS = f"{FLOAT8} (torch.float8_e4m3fn, ml_dtypes.{FLOAT8}, or ml_dtypes.float8_e4m3fn viewed as that)"


def dtype_name(array: Any) -> str:
    """`float32`, `bfloat16`, ... of a NumPy array or a torch tensor, whose float8_e4m3fn is taken by its bits."""
    name = str(array.dtype)
    return FLOAT8 if name == "torch.float8_e4m3fn" else name.removeprefix("torch.")


def expect(condition: bool, argument: str, got: Any, expected: str) -> None:
    if not condition:
        raise ValueError(f"{argument}: got {got}, expected {expected}")


def array(argument: str, value: Any, shape: tuple[int | str, ...], dtypes: tuple[str, ...]) -> None:
    """`value` is an array of the given shape and one of the dtypes.

    A string in the shape names a size that is free, but not 0 unless it is the number of drafts.
    """
    expect(hasattr(value, "shape") and hasattr(value, "dtype"), argument, type(value).__name__, "an array")
    matches = len(value.shape) == len(shape) and all(
        (have > 0 or want == "K") if isinstance(want, str) else have == want for have, want in zip(value.shape, shape)
    )
    above = ", no size 0" if len(value.shape) == len(shape) and 0 in value.shape else ""
    expect(matches, argument, f"shape {tuple(value.shape)}", f"shape [{', '.join(map(str, shape))}]{above}")
    expected = " or ".join(dtypes).replace(FLOAT8, FLOAT8_KINDS)
    expect(dtype_name(value) in dtypes, argument, f"dtype {dtype_name(value)}", expected)


def values_known(*arrays: Any) -> bool:
    """Whether values may be looked at: NumPy arrays only; a device tensor's values stay on the device."""
    return all(isinstance(value, np.ndarray) for value in arrays if value is not None)


def whole_number(argument: str, value: Any, low: int, high: int, what: str = "") -> None:
    """`value` is an integer in low..high, both included."""
    expected = what or f"a whole number, {low} to {high}"
    expect(hasattr(value, "__index__") and low <= value <= high, argument, repr(value), expected)


def positive_number(argument: str, value: Any, most: float = FLOAT32_MAX) -> None:
    """`value` is a number above 0; one that is symbolic, under tracing, is no int or float."""
    is_number = hasattr(value, "__float__") and not hasattr(value, "shape")
    expect(is_number and 0 < value <= most, argument, repr(value), f"a number above 0, at most {most:.7g}")


def in_range(argument: str, value: Any, low: float, high: float, what: str) -> None:
    """Every entry lies in low..high, both included; NaN does not."""
    if not values_known(value):
        return
    inside = (value >= low) & (value <= high)
    if not inside.all():
        where = tuple(int(i) for i in np.argwhere(~inside)[0])
        raise ValueError(f"{argument}: got {value[where]} at {list(where)}, expected {what}")
