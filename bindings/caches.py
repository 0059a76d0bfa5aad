"""What the operations on caches share: one array or one a layer, the path of a chain, arrays back from a launch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from draft_verify.arrays import is_torch
from draft_verify.checks.general import FLOAT8, ITEMSIZES, dtype_name, expect

# A layer's rows move by tiles of so many rows or bytes, whichever is reached first, each at most 100 instructions.
TILE_ROWS = 128
TILE_BYTES = 1 << 19
MOST_TILES = 180  # of a launch: keeps programs below 20,000 instructions


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


def by_layers(
    launch_some: Callable[[slice], tuple], value_caches: tuple, cache_layout: str, rows: int
) -> tuple[tuple, tuple]:
    """The outputs, keys' then values', of `launch_some` for some layers after the other, as many as one launch takes.

    `rows`: that move in a layer, of all sequences.
    """
    cache = value_caches[0]
    heads = cache.shape[2 if cache_layout == "NPHD" else 1]
    num_bytes = rows * heads * cache.shape[3] * ITEMSIZES[dtype_name(cache)]
    most = max(1, MOST_TILES // max(1, rows // TILE_ROWS, num_bytes // TILE_BYTES))
    keys, values = (), ()
    for first in range(0, len(value_caches), most):
        outputs = launch_some(slice(first, first + most))
        keys += tuple(outputs[: len(outputs) // 2])
        values += tuple(outputs[len(outputs) // 2 :])
    return keys, values


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
