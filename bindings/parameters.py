"""Optional arguments as the arrays a kernel takes: one value a sequence, of the caller's own kind of array."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from draft_verify.arrays import is_torch


def per_sequence(value: Any, default: float, batch: int, dtype: str, like: Any) -> Any:
    """`value` as [B] of `dtype`: None is the default, a number or a scalar array holds for all, an array stays.

    `like` is an array of the kind (and on the device) that the result should be.
    """
    if getattr(value, "ndim", 0) > 0:
        return value
    if is_torch(value):
        return value.reshape(1).repeat(batch)
    if is_torch(like):
        return like.new_full((batch,), default if value is None else value, dtype=getattr(sys.modules["torch"], dtype))
    return np.full(batch, default if value is None else value, dtype)
