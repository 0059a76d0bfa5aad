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
        return value.reshape(1).repeat(batch).to(getattr(sys.modules["torch"], dtype))
    if is_torch(like):
        return like.new_full((batch,), default if value is None else value, dtype=getattr(sys.modules["torch"], dtype))
    return np.full(batch, default if value is None else value, dtype)


def truncation(top_k: Any, top_p: Any, min_p: Any, batch: int, like: Any) -> tuple[bool, Any, Any, Any]:
    """Whether any of the three was given, and then all as [B] with the others off; else None each."""
    if top_k is None and top_p is None and min_p is None:
        return False, None, None, None
    return (
        True,
        per_sequence(top_k, 0, batch, "int32", like),
        per_sequence(top_p, 1.0, batch, "float32", like),
        per_sequence(min_p, 0.0, batch, "float32", like),
    )


def draft_law(draft_logits: Any, draft_probs: Any) -> tuple[Any, str]:
    """The law that drafts were drawn from, as the kernels take it: the array or None, and which kind it is."""
    if draft_logits is not None:
        return draft_logits, "logits"
    if draft_probs is not None:
        return draft_probs, "probs"
    return None, "one_hot"
