"""torch tensors as NumPy arrays and back.

A torch tensor on the CPU becomes a NumPy view of its own memory, so that in-place operations reach it; bfloat16 and
float8 go by their bits, which NumPy knows through ml_dtypes. torch is never imported here: a torch tensor can only
come from a caller who has it.
"""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np

# trn2's float8_e4m3 and torch's float8_e4m3fn share their bits up to 240, the largest value trn2 knows.
_BY_BITS = {
    "bfloat16": ("int16", ml_dtypes.bfloat16),
    "float8_e4m3fn": ("uint8", ml_dtypes.float8_e4m3),
    "float8_e5m2": ("uint8", ml_dtypes.float8_e5m2),
}


def is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def to_numpy(array: Any) -> Any:
    """A torch CPU tensor as a NumPy view of the same memory; tuples entry by entry; anything else as it is."""
    if isinstance(array, tuple | list):
        return type(array)(to_numpy(entry) for entry in array)
    if not is_torch(array) or array.device.type != "cpu":
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
    array = np.require(array, requirements="C")  # ascontiguousarray gives a scalar a dimension
    for name, (carrier, dtype) in _BY_BITS.items():
        if array.dtype == dtype:
            return torch.from_numpy(array.view(carrier)).view(getattr(torch, name))
    return torch.from_numpy(array)
