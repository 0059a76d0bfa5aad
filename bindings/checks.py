"""Every check of shapes, dtypes, layouts and values, in one place: one function per operation.

All raise ValueError naming the argument, what came and what was expected, before anything is written.
"""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np

FLOATS = ("float32", "bfloat16")
FLOAT8 = "float8_e4m3"
LARGEST_FLOAT8 = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3).max)


def dtype_name(array: Any) -> str:
    """`float32`, `bfloat16`, ... of a NumPy array or a torch tensor, whose float8_e4m3fn is taken by its bits."""
    name = str(array.dtype)
    return FLOAT8 if name == "torch.float8_e4m3fn" else name.removeprefix("torch.")


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


CACHE_LAYOUTS = ("BHSD", "BHDS", "NHPD", "NPHD")
MAX_WINDOW = 128  # the rows of a window are spread over the 128 partitions
MAX_RING_POSITION = 1 << 24  # the kernel divides positions in fp32


def commit_window(
    key_caches: tuple,
    value_caches: tuple,
    keys: tuple,
    values: tuple,
    seq_lens: Any,
    num_accepted: Any,
    path: Any,
    block_table: Any,
    cache_layout: str,
    ring: bool,
    key_scale: Any,
    value_scale: Any,
) -> None:
    """Checks one window a layer against its cache."""
    layers = len(key_caches)
    for argument, entries in (("value_cache", value_caches), ("key", keys), ("value", values)):
        expect(len(entries) == layers, argument, f"{len(entries)} layers", f"{layers} as in key_cache")
    array("key", keys[0], ("B", "Hkv", "T", "D"), FLOATS)
    batch, heads, rows, head_dim = keys[0].shape
    expect(1 <= rows <= MAX_WINDOW, "key", f"a window of {rows} rows", f"1 to {MAX_WINDOW}")
    expect(1 <= batch <= MAX_WINDOW, "key", f"a batch of {batch}", f"1 to {MAX_WINDOW} sequences")
    for argument, entries in (("key", keys), ("value", values)):
        for entry in entries:
            array(argument, entry, tuple(keys[0].shape), (dtype_name(keys[0]),))
    slots, num_blocks = caches(
        key_caches, value_caches, batch, heads, head_dim, dtype_name(keys[0]), block_table, cache_layout
    )
    committed(seq_lens, num_accepted, path, batch, rows, MAX_RING_POSITION if ring else slots)
    if num_blocks:
        blocks_written(block_table, seq_lens, num_accepted, num_blocks, slots, ring)
    for argument, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        cache_scale(argument, scale, layers, heads, dtype_name(key_caches[0]) == FLOAT8)


def caches(
    key_caches: tuple,
    value_caches: tuple,
    batch: int,
    heads: int,
    head_dim: int,
    dtype: str,
    block_table: Any,
    cache_layout: str,
) -> tuple[int, int]:
    """Checks writable caches of one shape, in `dtype` or fp8; returns a sequence's slots, and N where paged, else 0."""
    expect(cache_layout in CACHE_LAYOUTS, "cache_layout", repr(cache_layout), f"one of {', '.join(CACHE_LAYOUTS)}")
    paged = cache_layout in ("NHPD", "NPHD")
    expect(
        paged == (block_table is not None), "block_table", "one" if not paged else None, "one with NHPD and NPHD only"
    )
    shape = {
        "BHSD": (batch, heads, "S", head_dim),
        "BHDS": (batch, heads, "S", head_dim),
        "NHPD": ("N", heads, "P", head_dim),
        "NPHD": ("N", "P", heads, head_dim),
    }[cache_layout]
    array("value_cache", value_caches[0], shape, (dtype, FLOAT8))
    value_shape = tuple(value_caches[0].shape)
    key_shape = (batch, heads, head_dim, value_shape[2]) if cache_layout == "BHDS" else value_shape
    for argument, entries, wanted in (("key_cache", key_caches, key_shape), ("value_cache", value_caches, value_shape)):
        for entry in entries:
            array(argument, entry, wanted, (dtype_name(value_caches[0]),))
            size = int(np.prod(wanted))
            expect(size < 2**31, argument, f"{size} elements", "fewer than 2^31: indices are int32")
            expect(not values_known(entry) or entry.flags.writeable, argument, "a read-only array", "a writable one")
    if not paged:
        return value_shape[2], 0
    array("block_table", block_table, (batch, "M"), ("int32",))
    block_size = value_shape[2 if cache_layout == "NHPD" else 1]
    return block_table.shape[1] * block_size, value_shape[0]


def committed(seq_lens: Any, num_accepted: Any, path: Any, batch: int, rows: int, max_length: int) -> None:
    """Checks the lengths of a step, and the path of the rows that it keeps."""
    array("seq_lens", seq_lens, (batch,), ("int32",))
    array("num_accepted", num_accepted, (batch,), ("int32",))
    in_range("num_accepted", num_accepted, -1, rows - 1, f"-1 (empty slot) to T - 1 = {rows - 1}")
    if path is not None:
        array("path", path, (batch, rows), ("int32",))
    if not values_known(seq_lens, num_accepted, path):
        return
    for b in np.flatnonzero(num_accepted >= 0):
        length, kept = int(seq_lens[b]), int(num_accepted[b]) + 1
        expect(
            0 <= length <= max_length - kept,
            "seq_lens",
            f"{length} at [{b}] with {kept} rows to keep",
            f"room for them among {max_length} positions",
        )
        if path is not None:
            steps = path[b, :kept].tolist()
            expect(
                steps[0] == 0 and all(a < b for a, b in itertools.pairwise(steps)) and steps[-1] < rows,
                "path",
                f"{steps} at [{b}]",
                f"window rows that start with 0 and rise, below {rows}",
            )


def blocks_written(block_table: Any, seq_lens: Any, num_accepted: Any, num_blocks: int, slots: int, ring: bool) -> None:
    """Checks that each row goes to a block that exists, and that no two sequences write to one."""
    if not values_known(block_table, seq_lens, num_accepted):
        return
    block_size = slots // block_table.shape[1]
    owner: dict[int, int] = {}
    for b in np.flatnonzero(num_accepted >= 0):
        positions = np.arange(seq_lens[b], seq_lens[b] + num_accepted[b] + 1)
        for entry in np.unique((positions % slots if ring else positions) // block_size):
            block = int(block_table[b, entry])
            expect(
                0 <= block < num_blocks, "block_table", f"{block} at [{b}, {entry}]", f"a block, 0 to {num_blocks - 1}"
            )
            expect(
                owner.setdefault(block, b) == b,
                "block_table",
                f"block {block} for sequences {owner[block]} and {b}",
                "blocks written by one sequence each (copy on write is the caller's)",
            )


def cache_scale(argument: str, scale: Any, layers: int, heads: int, fp8: bool) -> None:
    """Checks the scale of an fp8 cache: a positive number, [Hkv] or [layers, Hkv] float32; no other cache takes one."""
    if scale is None:
        return
    expect(fp8, argument, "a scale", "None for a cache that is not fp8")
    if isinstance(scale, int | float):
        scale = np.asarray(scale, np.float32)
    shape, dtype = tuple(scale.shape), dtype_name(scale)
    expect(
        shape in ((), (heads,), (layers, heads)),
        argument,
        f"shape {shape}",
        f"a number, [{heads}] or [{layers}, {heads}]",
    )
    expect(dtype == "float32", argument, f"dtype {dtype}", "float32")
    in_range(argument, scale, np.finfo(np.float32).tiny, np.finfo(np.float32).max, "a positive finite number")
