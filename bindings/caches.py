"""What the operations on caches share: one array or one a layer, the path of a chain, arrays back from a launch."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from draft_verify.arrays import is_torch
from draft_verify.checks.general import FLOAT8, dtype_name, expect


def as_layers(*arrays: Any) -> tuple[tuple, ...]:
    """Each argument as a tuple with one entry a layer."""
    return tuple(tuple(entry) if isinstance(entry, tuple | list) else (entry,) for entry in arrays)


def expect_tensors(argument: str, value: Any) -> None:
    """Among tensors, what is written in place is a tensor too: of an array, a copy would be written."""
    for entry in as_layers(value)[0]:
        expect(is_torch(entry), argument, type(entry).__name__, "a tensor, as other arguments are")


def one_or_layers(entries: tuple) -> Any:
    """The argument of a kernel: a tuple with one entry a layer, or where there is but one, that."""
    return entries[0] if len(entries) == 1 else entries


def chain_path(like: Any, batch: int, rows: int) -> Any:
    """The path of a chain, 0, 1, 2, ..., [batch, rows] int32, where `like` lives."""
    if is_torch(like):
        torch = sys.modules["torch"]
        return torch.arange(rows, dtype=torch.int32, device=like.device).repeat(batch, 1)
    return np.tile(np.arange(rows, dtype=np.int32), (batch, 1))


def full_like_lengths(like: Any, value: int) -> Any:
    """[B] int32 of one value, where `like` [B] lives."""
    if is_torch(like):
        return sys.modules["torch"].full_like(like, value)
    return np.full_like(like, value)


def smaller(lengths: Any, limits: Any) -> Any:
    """[B] int32, the smaller of `lengths` [B] and `limits` [B] or [1]."""
    if is_torch(lengths):
        return sys.modules["torch"].minimum(lengths, limits.to(lengths.dtype))
    return np.minimum(lengths, limits.astype(lengths.dtype))


def layer_scales(scale: Any, cache: Any, layers: int, heads: int) -> Any:
    """The scale of an fp8 cache, a number, [Hkv] or [layers, Hkv], as [layers, Hkv] float32; None for other caches."""
    if dtype_name(cache) != FLOAT8:
        return None
    if scale is None:
        scale = 1.0
    if is_torch(cache):
        torch = sys.modules["torch"]
        return torch.as_tensor(scale, dtype=torch.float32, device=cache.device).expand(layers, heads).contiguous()
    return np.ascontiguousarray(np.broadcast_to(np.asarray(scale, np.float32), (layers, heads)))


def written(arrays: tuple, outputs: tuple) -> tuple:
    """The arrays that a kernel wrote in place: NumPy arrays hold its output afterwards, device tensors are its output.

    A provider that works on copies, as some do for non-contiguous arrays, is caught up with here.
    """
    if not isinstance(arrays[0], np.ndarray):
        return tuple(outputs[: len(arrays)])
    for array, output in zip(arrays, outputs):
        if not np.shares_memory(array, output):
            array[...] = output
    return arrays
