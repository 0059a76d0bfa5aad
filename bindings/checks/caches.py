"""Caches of every layout, and the operations that write them, or take rows by what was accepted."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from draft_verify.checks.general import (
    FLOAT8,
    FLOATS,
    ITEMSIZES,
    array,
    dtype_name,
    expect,
    in_range,
    values_known,
    whole_number,
)

CACHE_LAYOUTS = ("BHSD", "BHDS", "NHPD", "NPHD")
MAX_WINDOW = 128  # rows of a window and sequences of a batch are spread over the 128 partitions
MAX_BLOCKS = 65_535  # of a sequence: an access pattern counts in 16 bits
MAX_CONV_PART = 16384  # elements on a partition, twice: before and after the shift
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
    array("key", keys[0], ("B", "Hkv", "T", "D"), FLOATS)
    batch, heads, rows, head_dim = keys[0].shape
    expect(rows <= MAX_WINDOW, "key", f"a window of {rows} rows", f"1 to {MAX_WINDOW}")
    for argument, entries in (("key", keys), ("value", values)):
        expect(
            len(entries) == len(key_caches), argument, f"{len(entries)} layers", f"{len(key_caches)} as in key_cache"
        )
        for entry in entries:
            array(argument, entry, tuple(keys[0].shape), (dtype_name(keys[0]),))
    dtypes = (dtype_name(keys[0]), FLOAT8)
    slots, num_blocks = caches(key_caches, value_caches, (batch, heads, head_dim), dtypes, block_table, cache_layout)
    committed(seq_lens, num_accepted, path, batch, rows, MAX_RING_POSITION if ring else slots)
    if num_blocks:
        blocks_written(block_table, seq_lens, num_accepted, num_blocks, slots, ring)
    for argument, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        cache_scale(argument, scale, len(key_caches), heads, dtype_name(key_caches[0]) == FLOAT8)


def compact_window(
    key_caches: tuple,
    value_caches: tuple,
    seq_lens: Any,
    path: Any,
    num_accepted: Any,
    draft_lens: Any,
    block_table: Any,
    cache_layout: str,
    ring: bool,
) -> None:
    """Checks caches and the rows of them that move."""
    array("path", path, ("B", "T"), ("int32",))
    batch, rows = path.shape
    expect(rows <= MAX_WINDOW, "path", f"a window of {rows} rows", f"1 to {MAX_WINDOW}")
    sizes = (batch, "Hkv", "D")
    slots, num_blocks = caches(key_caches, value_caches, sizes, (*FLOATS, FLOAT8), block_table, cache_layout)
    room = slots
    if ring:
        expect(rows <= slots, "path", f"a window of {rows} rows", f"at most the ring's {slots} slots")
        room = MAX_RING_POSITION
    committed(seq_lens, num_accepted, path, batch, rows, room)
    if draft_lens is not None:
        array("draft_lens", draft_lens, (batch,), ("int32",))
        in_range("draft_lens", draft_lens, -1, rows - 1, f"-1 (empty slot) to T - 1 = {rows - 1}")
    if not values_known(seq_lens, num_accepted, path):
        return
    last = np.where(num_accepted >= 0, path[np.arange(batch), num_accepted], -1).astype(np.int32)
    for b in np.flatnonzero(last >= 0):
        expect(
            seq_lens[b] + last[b] < room,
            "path",
            f"row {last[b]} at [{b}] after {seq_lens[b]} tokens",
            f"a row at one of {room} positions",
        )
        if draft_lens is not None and values_known(draft_lens):
            where = f"row {last[b]} at [{b}] with draft_lens {draft_lens[b]}"
            expect(last[b] <= draft_lens[b], "path", where, "a row that was written")
    if num_blocks:
        blocks_written(block_table, seq_lens, last, num_blocks, slots, ring)


def ring_window(
    key_caches: tuple, value_caches: tuple, seq_lens: Any, rows: int, block_table: Any, cache_layout: str
) -> tuple[int, int]:
    """Checks caches that are rings, and a window of `rows` that fits into one; returns Hkv and D."""
    array("seq_lens", seq_lens, ("B",), ("int32",))
    sizes = (seq_lens.shape[0], "Hkv", "D")
    slots, num_blocks = caches(key_caches, value_caches, sizes, (*FLOATS, FLOAT8), block_table, cache_layout)
    most = min(slots, MAX_WINDOW)
    whole_number("num_rows", rows, 1, most, f"1 to {most}: a window never meets itself in the ring")
    in_range("seq_lens", seq_lens, -1, MAX_RING_POSITION - rows, f"-1 (empty slot) to {MAX_RING_POSITION - rows}")
    if num_blocks:
        in_range("block_table", block_table, 0, num_blocks - 1, f"a block, 0 to {num_blocks - 1}: a ring uses them all")
    shape = value_caches[0].shape
    return shape[2 if cache_layout == "NPHD" else 1], shape[3]


def restore_ring(
    key_caches: tuple,
    value_caches: tuple,
    saved_keys: tuple,
    saved_values: tuple,
    seq_lens: Any,
    num_accepted: Any,
    block_table: Any,
    cache_layout: str,
) -> None:
    """Checks rings and the rows saved from them."""
    array("saved_key", saved_keys[0], ("B", "Hkv", "T", "D"), (*FLOATS, FLOAT8))
    rows = saved_keys[0].shape[2]
    heads, head_dim = ring_window(key_caches, value_caches, seq_lens, rows, block_table, cache_layout)
    shape = (seq_lens.shape[0], heads, rows, head_dim)
    for argument, entries in (("saved_key", saved_keys), ("saved_value", saved_values)):
        expect(
            len(entries) == len(key_caches), argument, f"{len(entries)} layers", f"{len(key_caches)} as in key_cache"
        )
        for entry in entries:
            array(argument, entry, shape, (dtype_name(key_caches[0]),))
    array("num_accepted", num_accepted, (seq_lens.shape[0],), ("int32",))
    in_range("num_accepted", num_accepted, -1, rows - 1, f"-1 (empty slot) to T - 1 = {rows - 1}")


def select_rows(argument: str, rows: Any, num_accepted: Any) -> None:
    """Checks [B, T, ...] of which one row a sequence is taken."""
    expect(hasattr(rows, "shape") and len(rows.shape) >= 3, argument, getattr(rows, "shape", rows), "[B, T, ...]")
    array(argument, rows, tuple(rows.shape), FLOATS)
    batch, window = rows.shape[:2]
    size = math.prod(rows.shape)
    expect(0 < size < 2**31, argument, f"{size} elements", "1 to 2^31 - 1: indices are int32")
    expect(batch <= MAX_WINDOW, argument, f"{batch} sequences", f"1 to {MAX_WINDOW}")
    array("num_accepted", num_accepted, (batch,), ("int32",))
    in_range("num_accepted", num_accepted, -1, window - 1, f"-1 (empty slot) to T - 1 = {window - 1}")


def shift_conv_window(history: Any, num_accepted: Any, num_rows: int) -> None:
    """Checks [B, C, W - 1 + T] of which W - 1 columns a sequence are taken."""
    array("history", history, ("B", "C", "W - 1 + T"), FLOATS)
    batch, channels, length = history.shape
    whole_number("num_rows", num_rows, 1, length - 1, f"1 to {length - 1}: at least one column is kept")
    # The kernel spreads channels over the largest number of partitions, at most 128, that divides them.
    part = channels // max(parts for parts in range(1, MAX_WINDOW + 1) if channels % parts == 0)
    expect(
        0 < part * length <= MAX_CONV_PART,
        "history",
        f"{channels} channels of {length} columns",
        f"channels that divide into at most 128 equal parts of {MAX_CONV_PART} elements or fewer",
    )
    array("num_accepted", num_accepted, (batch,), ("int32",))
    in_range("num_accepted", num_accepted, -1, num_rows - 1, f"-1 (empty slot) to T - 1 = {num_rows - 1}")


def caches(
    key_caches: tuple,
    value_caches: tuple,
    sizes: tuple[int | str, ...],
    dtypes: tuple[str, ...],
    block_table: Any,
    cache_layout: str,
    writable: bool = True,
) -> tuple[int, int]:
    """Checks caches of one shape and dtype, for `sizes` (B, Hkv, D), of which a string is free.

    Returns a sequence's slots, and the number of blocks, 0 where there are none.
    """
    expect(cache_layout in CACHE_LAYOUTS, "cache_layout", repr(cache_layout), f"one of {', '.join(CACHE_LAYOUTS)}")
    paged = cache_layout in ("NHPD", "NPHD")
    given = "none" if block_table is None else "one"
    expect(paged == (block_table is not None), "block_table", given, "one with NHPD and NPHD, none otherwise")
    batch, heads, head_dim = sizes
    expect(1 <= batch <= MAX_WINDOW, "seq_lens", f"{batch} sequences", f"1 to {MAX_WINDOW}")
    expect(
        len(value_caches) == len(key_caches) >= 1, "value_cache", f"{len(value_caches)} layers", "as many as key_cache"
    )
    shape = {
        "BHSD": (batch, heads, "S", head_dim),
        "BHDS": (batch, heads, "S", head_dim),
        "NHPD": ("N", heads, "P", head_dim),
        "NPHD": ("N", "P", heads, head_dim),
    }[cache_layout]
    array("value_cache", value_caches[0], shape, dtypes)
    dtype = dtype_name(value_caches[0])
    shape = tuple(value_caches[0].shape)
    key_shape = (*shape[:2], shape[3], shape[2]) if cache_layout == "BHDS" else shape
    for argument, entries, wanted in (("key_cache", key_caches, key_shape), ("value_cache", value_caches, shape)):
        for entry in entries:
            array(argument, entry, wanted, (dtype,))
            size = math.prod(wanted)
            expect(0 < size < 2**31, argument, f"{size} elements", "1 to 2^31 - 1: indices are int32")
            expect(
                size * ITEMSIZES[dtype] < 2**32,
                argument,
                f"{size} elements of {dtype}",
                "less than 4 GB a tensor (BIR156)",
            )
            if writable and values_known(entry):
                expect(entry.flags.writeable, argument, "a read-only array", "a writable one")
    if not paged:
        return shape[2], 0
    array("block_table", block_table, (batch, "M"), ("int32",))
    blocks = block_table.shape[1]
    expect(blocks <= MAX_BLOCKS, "block_table", f"{blocks} blocks a sequence", f"1 to {MAX_BLOCKS}")
    return block_table.shape[1] * shape[2 if cache_layout == "NHPD" else 1], shape[0]


def cache_scale(argument: str, scale: Any, layers: int, heads: int, fp8: bool) -> None:
    """Checks the scale of an fp8 cache: a positive number, [Hkv] or [layers, Hkv] float32; no other cache takes one."""
    if scale is None:
        return
    expect(fp8, argument, "a scale", "None for a cache that is not fp8")
    if isinstance(scale, int | float):
        scale = np.asarray(scale, np.float32)
    expected = f"a number, [{heads}] or [{layers}, {heads}]"
    expect(hasattr(scale, "shape") and hasattr(scale, "dtype"), argument, type(scale).__name__, expected)
    shape, dtype = tuple(scale.shape), dtype_name(scale)
    expect(shape in ((), (heads,), (layers, heads)), argument, f"shape {shape}", expected)
    expect(dtype == "float32", argument, f"dtype {dtype}", "float32")
    in_range(argument, scale, np.finfo(np.float32).tiny, np.finfo(np.float32).max, "a positive finite number")


def committed(seq_lens: Any, num_accepted: Any, path: Any, batch: int, rows: int, max_length: int) -> None:
    """Checks the lengths of a step, and the path of the rows that it keeps."""
    array("seq_lens", seq_lens, (batch,), ("int32",))
    array("num_accepted", num_accepted, (batch,), ("int32",))
    entries = rows
    if path is not None:
        array("path", path, (batch, "P"), ("int32",))
        entries = path.shape[1]
        expect(1 <= entries <= rows, "path", f"{entries} columns", f"1 to T = {rows}")
    in_range("num_accepted", num_accepted, -1, entries - 1, f"-1 (empty slot) to {entries - 1}")
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


def blocks_read(block_table: Any, sequence: int, length: int, block_size: int, num_blocks: int) -> None:
    """Checks that the blocks of a sequence's first `length` positions exist."""
    for entry in range(min(-(-length // block_size), block_table.shape[1])):
        block = int(block_table[sequence, entry])
        where = f"{block} at [{sequence}, {entry}]"
        expect(0 <= block < num_blocks, "block_table", where, f"a block, 0 to {num_blocks - 1}")
