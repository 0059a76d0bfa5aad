"""Every check of shapes, dtypes, layouts and values, in one place: one function per operation.

All raise ValueError naming the argument, what came and what was expected, before anything is written.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

FLOATS = ("float32", "bfloat16")
FLOAT8 = "float8_e4m3"
FLOAT8_KINDS = f"{FLOAT8} (torch.float8_e4m3fn, or an array of ml_dtypes.{FLOAT8})"


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
    expected = " or ".join(dtypes).replace(FLOAT8, FLOAT8_KINDS)
    expect(dtype_name(value) in dtypes, argument, f"dtype {dtype_name(value)}", expected)


def values_known(*arrays: Any) -> bool:
    """Whether values may be looked at: NumPy arrays only; a device tensor's values stay on the device."""
    return all(isinstance(value, np.ndarray) for value in arrays if value is not None)


def whole_number(argument: str, value: Any, low: int, high: int, what: str = "") -> None:
    """`value` is an integer in low..high, both included."""
    expected = what or f"a whole number, {low} to {high}"
    expect(hasattr(value, "__index__") and low <= value <= high, argument, repr(value), expected)


def in_range(argument: str, value: Any, low: float, high: float, what: str) -> None:
    """Every entry lies in low..high, both included; NaN does not."""
    if not values_known(value):
        return
    inside = (value >= low) & (value <= high)
    if not inside.all():
        where = tuple(int(i) for i in np.argwhere(~inside)[0])
        raise ValueError(f"{argument}: got {value[where]} at {list(where)}, expected {what}")


CACHE_LAYOUTS = ("BHSD", "BHDS", "NHPD", "NPHD")
MAX_WINDOW = 128  # rows of a window and sequences of a batch are spread over the 128 partitions
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
    expect(1 <= rows <= MAX_WINDOW, "key", f"a window of {rows} rows", f"1 to {MAX_WINDOW}")
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
    expect(1 <= rows <= MAX_WINDOW, "path", f"a window of {rows} rows", f"1 to {MAX_WINDOW}")
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
    size = int(np.prod(rows.shape))
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
            size = int(np.prod(wanted))
            expect(0 < size < 2**31, argument, f"{size} elements", "1 to 2^31 - 1: indices are int32")
            if writable and values_known(entry):
                expect(entry.flags.writeable, argument, "a read-only array", "a writable one")
    if not paged:
        return shape[2], 0
    array("block_table", block_table, (batch, "M"), ("int32",))
    return block_table.shape[1] * shape[2 if cache_layout == "NHPD" else 1], shape[0]


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
    expected = f"a number, [{heads}] or [{layers}, {heads}]"
    expect(hasattr(scale, "shape") and hasattr(scale, "dtype"), argument, type(scale).__name__, expected)
    shape, dtype = tuple(scale.shape), dtype_name(scale)
    expect(shape in ((), (heads,), (layers, heads)), argument, f"shape {shape}", expected)
    expect(dtype == "float32", argument, f"dtype {dtype}", "float32")
    in_range(argument, scale, np.finfo(np.float32).tiny, np.finfo(np.float32).max, "a positive finite number")


MAX_ROWS = 128  # a row's facts share one partition each
MAX_VOCAB = 1 << 22  # ids are exact in fp32, and the masses of one row fit on the chip
MAX_PLACES = 50_000  # of a partition, where the draft ids of its target ids are
DRAFT_KINDS = ("one_hot", "logits", "probs")
CHAIN_RULES = ("token", "block")


def columns_that_count(vocab_size: int | None, width: int) -> int:
    """vocab_size, by default all columns."""
    vocab_size = width if vocab_size is None else vocab_size
    whole_number("vocab_size", vocab_size, 1, min(width, MAX_VOCAB))
    return vocab_size


def acceptance(draft_tokens: Any, target_logits: Any, draft_lens: Any, vocab_size: int | None) -> tuple[int, int, int]:
    """What all rules share. Returns batch, rows of a window and the columns that count."""
    array("target_logits", target_logits, ("B", "T", "V"), FLOATS)
    batch, rows, width = target_logits.shape
    expect(batch >= 1, "target_logits", f"a batch of {batch}", "at least one sequence")
    expect(1 <= rows <= MAX_ROWS, "target_logits", f"a window of {rows} rows", f"1 to {MAX_ROWS}")
    array("draft_tokens", draft_tokens, (batch, rows - 1), ("int32",))
    vocab_size = columns_that_count(vocab_size, width)
    if draft_lens is not None:
        array("draft_lens", draft_lens, (batch,), ("int32",))
        in_range("draft_lens", draft_lens, -1, rows - 1, f"-1 (an empty slot) to K = {rows - 1}")
    return batch, rows, vocab_size


def uniforms(value: Any, batch: int, columns: int) -> None:
    array("uniforms", value, (batch, columns), ("float32",))
    smallest = np.finfo(np.float32).tiny
    in_range("uniforms", value, smallest, np.nextafter(np.float32(1), np.float32(0)), "numbers strictly within (0, 1)")


def sampling(batch: int, temperature: Any, top_k: Any, top_p: Any, min_p: Any) -> None:
    """Parameters are None, numbers, or one value a sequence."""
    for argument, value, dtype, low, high, what in (
        ("temperature", temperature, "float32", 0, 1e6, "0 (greedy) or a finite number above it"),
        ("top_k", top_k, "int32", -1, np.iinfo(np.int32).max, "0 or -1 (off), or how many logits stay"),
        ("top_p", top_p, "float32", np.finfo(np.float32).tiny, 1, "a number in (0, 1]"),
        ("min_p", min_p, "float32", 0, 1, "a number in [0, 1]"),
    ):
        if value is None:
            continue
        if getattr(value, "ndim", 0) > 0:
            array(argument, value, (batch,), (dtype,))
            in_range(argument, value, low, high, what)
        elif not hasattr(value, "dtype") or values_known(value):
            number = isinstance(value, int | float | np.ndarray)
            whole = number and (dtype == "float32" or float(value).is_integer())
            expect(whole and low <= value <= high, argument, value, what)


def is_zero(value: Any) -> bool:
    """Whether a number, or an array whose values are known, is 0 throughout."""
    if isinstance(value, int | float):
        return value == 0
    return isinstance(value, np.ndarray | np.generic) and not value.any()


def unused(why: str, **arguments: Any) -> None:
    """Refuses arguments that would be ignored without a word, and says why they would."""
    for argument, value in arguments.items():
        got = value if isinstance(value, int | float) else type(value).__name__
        expect(value is None, argument, got, f"None {why}")


def rejection_sampling(
    draft_tokens: Any,
    target_logits: Any,
    uniforms_: Any,
    draft_logits: Any,
    draft_probs: Any,
    draft_lens: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    rule: str,
    vocab_size: int | None,
    draft_to_target: Any = None,
    target_to_draft: Any = None,
) -> tuple[int, int, int]:
    expect(rule in CHAIN_RULES, "rule", repr(rule), " or ".join(map(repr, CHAIN_RULES)))
    batch, rows, vocab_size = acceptance(draft_tokens, target_logits, draft_lens, vocab_size)
    uniforms(uniforms_, batch, rows + 1)
    expect(draft_logits is None or draft_probs is None, "draft_probs", "draft_logits as well", "one draft law")
    shape = (batch, rows - 1, target_logits.shape[2])
    draft_laws(draft_logits, draft_probs, shape, draft_to_target, target_to_draft, vocab_size)
    sampling(batch, temperature, top_k, top_p, min_p)
    return batch, rows, vocab_size


def draft_laws(
    draft_logits: Any,
    draft_probs: Any,
    shape: tuple[int, int, int],
    draft_to_target: Any,
    target_to_draft: Any,
    vocab_size: int,
) -> None:
    """Checks a draft law, if there is one: of `shape`, or with as many columns as the draft's own vocabulary has."""
    given = draft_logits is not None or draft_probs is not None
    for argument, mapped in (("draft_to_target", draft_to_target), ("target_to_draft", target_to_draft)):
        expect(given or mapped is None, argument, "no draft law", "draft_logits or draft_probs with it")
    columns: int | str = shape[2]
    if draft_to_target is not None:
        expect(target_to_draft is None, "target_to_draft", "draft_to_target as well", "one of the two maps")
        draft_to_target_ids(draft_to_target, vocab_size)
        columns = draft_to_target.shape[0]
    if target_to_draft is not None:
        target_to_draft_ids(target_to_draft, vocab_size)
        columns = "Vd"
    for argument, law in (("draft_logits", draft_logits), ("draft_probs", draft_probs)):
        if law is not None:
            array(argument, law, (*shape[:2], columns), FLOATS)


def draft_to_target_ids(draft_to_target: Any, vocab_size: int) -> None:
    array("draft_to_target", draft_to_target, ("Vd",), ("int32",))
    expect(draft_to_target.shape[0] >= 1, "draft_to_target", "no ids", "at least one draft id")
    in_range("draft_to_target", draft_to_target, 0, vocab_size - 1, f"target ids, 0 to {vocab_size - 1}")


def target_to_draft_ids(target_to_draft: Any, vocab_size: int | str) -> None:
    array("target_to_draft", target_to_draft, ("M", vocab_size), ("int32",))
    entries, width = target_to_draft.shape
    expect(entries >= 1, "target_to_draft", "no rows", "one row at least")
    expect(1 <= width <= MAX_VOCAB, "target_to_draft", f"{width} target ids", f"1 to {MAX_VOCAB}")


def shared_target_ids(target_to_draft: Any) -> None:
    """Checks that the kernel has room for the places of all draft ids beside a law."""
    entries, width = target_to_draft.shape
    most = MAX_PLACES // -(-width // 128) - 4
    expect(
        entries <= most, "target_to_draft", f"{entries} draft ids of one target id", f"at most {most} of {width} ids"
    )


def project_draft_law(
    target_to_draft: Any,
    draft_logits: Any,
    draft_probs: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
) -> int:
    """Returns the batch."""
    target_to_draft_ids(target_to_draft, "V")
    laws = [law for law in (draft_logits, draft_probs) if law is not None]
    expect(len(laws) == 1, "draft_probs", f"{len(laws)} draft laws", "draft_logits or draft_probs, one of them")
    array("draft_probs" if draft_logits is None else "draft_logits", laws[0], ("B", "R", "Vd"), FLOATS)
    batch, rows, size = laws[0].shape
    expect(batch >= 1 and 1 <= rows <= MAX_ROWS, "draft_probs", f"{batch} x {rows} rows", f"1 x 1 to B x {MAX_ROWS}")
    expect(1 <= size <= MAX_VOCAB, "draft_probs", f"{size} draft ids", f"1 to {MAX_VOCAB}")
    sampling(batch, temperature, top_k, top_p, min_p)
    return batch


def uniforms_for(seeds: Any, positions: Any, K: int, purpose: str, purposes: tuple[str, ...]) -> None:
    array("seeds", seeds, ("B",), ("uint32", "int32", "uint64", "int64"))
    array("positions", positions, tuple(seeds.shape), ("int32", "int64", "uint32"))
    in_range("positions", positions, 0, 2**32 - 1, "a position, 0 or more")
    expect(hasattr(K, "__index__") and K >= 0, "K", repr(K), "a number of drafts, 0 or more")
    expect(purpose in purposes, "purpose", repr(purpose), " or ".join(map(repr, purposes)))


MAX_HEAD_DIM = 256
MAX_ATTENTION_WINDOW = 64
MAX_ATTENTION_BATCH = 64
MAX_ATTENTION_SLOTS = 131_072
MAX_SHARDS = 128  # a shard a partition


def attention(
    query: Any,
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    seq_lens: Any,
    *,
    draft_lens: Any,
    tree: Any,
    block_table: Any,
    cache_layout: str,
    scale: float | None,
    sliding_window: int | None,
    ring: bool,
    sinks: Any,
    softcap: float | None,
    key_scale: Any,
    value_scale: Any,
    cache_start: Any,
    query_positions: Any,
) -> None:
    """Checks a window against the cache that it attends to."""
    array("query", query, ("B", "Hq", "T", "D"), FLOATS)
    batch, query_heads, rows, head_dim = query.shape
    expect(1 <= batch <= MAX_ATTENTION_BATCH, "query", f"a batch of {batch}", f"1 to {MAX_ATTENTION_BATCH} sequences")
    expect(1 <= rows <= MAX_ATTENTION_WINDOW, "query", f"a window of {rows} rows", f"1 to {MAX_ATTENTION_WINDOW}")
    expect(1 <= head_dim <= MAX_HEAD_DIM, "query", f"heads of {head_dim}", f"1 to {MAX_HEAD_DIM}")
    dtype = dtype_name(query)
    sizes = (batch, "Hkv", head_dim)
    slots, num_blocks = caches(
        (key_cache,), (value_cache,), sizes, (dtype, FLOAT8), block_table, cache_layout, writable=False
    )
    expect(slots <= MAX_ATTENTION_SLOTS, "key_cache", f"{slots} slots", f"at most {MAX_ATTENTION_SLOTS}")
    heads = value_cache.shape[2 if cache_layout == "NPHD" else 1]
    expect(query_heads % heads == 0, "query", f"{query_heads} heads", f"a multiple of Hkv = {heads}")
    expect((key is None) == (value is None), "value", "only one of key and value", "both or neither")
    for argument, entry in (("key", key), ("value", value)):
        if entry is not None:
            array(argument, entry, (batch, heads, rows, head_dim), (dtype,))
    fp8 = dtype_name(value_cache) == FLOAT8
    cache_scale("key_scale", key_scale, 1, heads, fp8)
    cache_scale("value_scale", value_scale, 1, heads, fp8)

    for argument, number in (("scale", scale), ("softcap", softcap)):
        if number is not None:
            positive = isinstance(number, int | float) and 0 < number < np.inf
            expect(positive, argument, number, "a positive finite number")
    if sliding_window is not None:
        whole_number("sliding_window", sliding_window, 1, 2**31 - 1, "at least 1, or None")
    if sinks is not None:
        array("sinks", sinks, (query_heads,), ("float32",))
    expect(not ring or cache_start is None, "cache_start", "one", "None for a ring, whose positions are absolute")
    array("seq_lens", seq_lens, (batch,), ("int32",))
    for argument, entry in (("cache_start", cache_start), ("query_positions", query_positions)):
        if entry is not None:
            array(argument, entry, (batch,), ("int32",))
            in_range(argument, entry, 0, MAX_RING_POSITION - 1, f"a position, 0 to {MAX_RING_POSITION - 1}")
    if draft_lens is not None:
        array("draft_lens", draft_lens, (batch,), ("int32",))
        in_range("draft_lens", draft_lens, -1, rows - 1, f"-1 (an empty slot) to T - 1 = {rows - 1}")
    if tree is not None:
        attention_tree(tree, batch, rows, draft_lens)
    if values_known(seq_lens, draft_lens, block_table):
        for b in range(batch):
            window = (rows if draft_lens is None else int(draft_lens[b]) + 1) if key is not None else 0
            if draft_lens is not None and draft_lens[b] == -1:
                continue
            room = MAX_RING_POSITION if ring else slots
            length = int(seq_lens[b])
            fits = 0 <= length <= room - window
            expect(fits, "seq_lens", f"{length} at [{b}] with {window} window rows", f"room among {room} positions")
            if num_blocks:
                blocks_read(block_table, b, length, slots // block_table.shape[1], num_blocks)


def attention_cores(value_cache: Any, cache_layout: str, lnc: int) -> None:
    """Two cores share the heads, or, where their number is odd, the slots."""
    _, heads, slots, _ = value_cache.shape
    shared = cache_layout in ("NHPD", "NPHD") or heads % lnc == 0 or slots >= lnc
    expect(shared, "key_cache", f"one slot of {heads} heads for {lnc} cores", "two slots or an even number of heads")


def blocks_read(block_table: Any, sequence: int, length: int, block_size: int, num_blocks: int) -> None:
    """Checks that the blocks of a sequence's first `length` positions exist."""
    for entry in range(min(-(-length // block_size), block_table.shape[1])):
        block = int(block_table[sequence, entry])
        where = f"{block} at [{sequence}, {entry}]"
        expect(0 <= block < num_blocks, "block_table", where, f"a block, 0 to {num_blocks - 1}")


def attention_tree(tree: Any, batch: int, rows: int, draft_lens: Any) -> None:
    """Checks parents [T] or [B, T]: row 0 the root, parents before their children, padding last."""
    array("tree", tree, (rows,) if len(getattr(tree, "shape", ())) == 1 else (batch, rows), ("int32",))
    if not values_known(tree, draft_lens):
        return
    for b, parents in enumerate(np.broadcast_to(tree, (batch, rows)).tolist()):
        used = rows if draft_lens is None else int(draft_lens[b]) + 1
        live = min(used, rows - parents.count(-2))
        if used == 0:
            continue
        expect(parents[0] == -1, "tree", f"{parents[0]} at [{b}, 0]", "-1, the root")
        expect(-2 not in parents[:live], "tree", f"{parents} at [{b}]", "rows of padding (-2) after all others")
        for t in range(1, live):
            expect(0 <= parents[t] < t, "tree", f"parent {parents[t]} of row {t} at [{b}]", "an earlier row")


def merge_attention(outputs: Any, lses: Any) -> None:
    array("outputs", outputs, ("n", "B", "Hq", "T", "D"), FLOATS)
    expect(1 <= outputs.shape[0] <= MAX_SHARDS, "outputs", f"{outputs.shape[0]} shards", f"1 to {MAX_SHARDS}")
    array("lses", lses, tuple(outputs.shape[:4]), ("float32",))


TREE_RULES = ("greedy", "target_only", "without_replacement", "independent")


def tree_acceptance(
    tree: Any,
    draft_tokens: Any,
    target_logits: Any,
    uniforms_: Any,
    rule: str,
    draft_logits: Any,
    draft_probs: Any,
    draft_lens: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    vocab_size: int | None,
    draft_to_target: Any = None,
    target_to_draft: Any = None,
) -> tuple[int, int, int]:
    expect(rule in TREE_RULES, "rule", repr(rule), " or ".join(map(repr, TREE_RULES)))
    batch, rows, vocab_size = acceptance(draft_tokens, target_logits, draft_lens, vocab_size)
    attention_tree(tree, batch, rows, draft_lens)
    if uniforms_ is not None or rule != "greedy":
        uniforms(uniforms_, batch, rows + 1)
    laws = [law for law in (draft_logits, draft_probs) if law is not None]
    needed = rule in ("without_replacement", "independent")
    expect(len(laws) == needed, "draft_probs", f"{len(laws)} draft laws", f"{int(needed)} for rule {rule!r}")
    shape = (batch, rows, target_logits.shape[2])
    draft_laws(draft_logits, draft_probs, shape, draft_to_target, target_to_draft, vocab_size)
    sampling(batch, temperature, top_k, top_p, min_p)
    if rule == "greedy":
        temperature = None if is_zero(temperature) else temperature
        unused("with rule 'greedy'", temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    return batch, rows, vocab_size


def sample_tokens(
    logits: Any, uniforms_: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, vocab_size: int | None
) -> tuple[int, int]:
    array("logits", logits, ("B", "V"), FLOATS)
    batch, width = logits.shape
    expect(batch >= 1, "logits", f"a batch of {batch}", "at least one row")
    vocab_size = columns_that_count(vocab_size, width)
    uniforms(uniforms_, batch, 2)
    sampling(batch, temperature, top_k, top_p, min_p)
    return batch, vocab_size


def typical_acceptance(
    draft_tokens: Any,
    target_logits: Any,
    uniforms_: Any,
    posterior_threshold: float,
    posterior_alpha: float,
    tree: Any,
    temperature: Any,
    draft_lens: Any,
    vocab_size: int | None,
) -> tuple[int, int, int]:
    batch, rows, vocab_size = acceptance(draft_tokens, target_logits, draft_lens, vocab_size)
    uniforms(uniforms_, batch, rows + 1)
    expect(0 < posterior_threshold <= 1, "posterior_threshold", posterior_threshold, "a probability above 0")
    expect(0 < posterior_alpha < np.inf, "posterior_alpha", posterior_alpha, "a number above 0")
    if tree is not None:
        attention_tree(tree, batch, rows, draft_lens)
    sampling(batch, temperature, None, None, None)
    return batch, rows, vocab_size


def token_logprobs(
    target_logits: Any,
    tokens: Any,
    path: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    vocab_size: int | None,
) -> tuple[int, int]:
    array("target_logits", target_logits, ("B", "T", "V"), FLOATS)
    batch, rows, width = target_logits.shape
    expect(1 <= rows <= MAX_ROWS, "target_logits", f"a window of {rows} rows", f"1 to {MAX_ROWS}")
    vocab_size = columns_that_count(vocab_size, width)
    for argument, value, largest in (("tokens", tokens, vocab_size - 1), ("path", path, rows - 1)):
        array(argument, value, (batch, rows), ("int32",))
        in_range(argument, value, -1, largest, f"-1 to {largest}")
    sampling(batch, temperature, top_k, top_p, min_p)
    return batch, vocab_size


def mask_logits(logits: Any, allowed_mask: Any, vocab_size: int | None) -> int:
    array("logits", logits, ("B", "T", "V"), FLOATS)
    expect(allowed_mask is not None, "allowed_mask", None, "an array")
    batch, rows, width = logits.shape
    vocab_size = columns_that_count(vocab_size, width)
    allowed_ids(allowed_mask, (batch, rows, width))
    return vocab_size


def allowed_ids(allowed_mask: Any, shape: tuple[int, ...]) -> None:
    """Checks a grammar's bits, if there are any, for logits of `shape`."""
    if allowed_mask is not None:
        array("allowed_mask", allowed_mask, (*shape[:-1], -(-shape[-1] // 32)), ("int32",))


def shard(
    draft_tokens: Any,
    target_logits: Any,
    uniforms_: Any,
    shard: int,
    num_shards: int,
    vocab_size: int,
    draft_logits: Any,
    draft_probs: Any,
    draft_lens: Any,
    temperature: Any,
) -> tuple[int, int]:
    """One rank's part of a vocabulary. Returns batch and rows of a window."""
    batch, rows, width = acceptance(draft_tokens, target_logits, draft_lens, None)
    expect(num_shards in (1, 2, 4, 8, 16, 32, 64, 128), "num_shards", num_shards, "a power of two up to 128")
    expect(0 <= shard < num_shards, "shard", shard, f"a rank, 0 to {num_shards - 1}")
    whole_number("vocab_size", vocab_size, 1, min(width * num_shards, MAX_VOCAB))
    uniforms(uniforms_, batch, rows + 1)
    expect(draft_logits is None or draft_probs is None, "draft_probs", "draft_logits as well", "one draft law")
    for argument, law in (("draft_logits", draft_logits), ("draft_probs", draft_probs)):
        if law is not None:
            array(argument, law, (batch, rows - 1, width), FLOATS)
    sampling(batch, temperature, None, None, None)
    return batch, rows


def shard_statistics(statistics: Any, batch: int, rows: int) -> int:
    """Returns the number of ranks."""
    array("statistics", statistics, ("n", batch, rows, "5 * 128 / n + 2"), ("float32",))
    num_shards, *_, columns = statistics.shape
    expect(
        columns == 5 * (128 // num_shards) + 2,
        "statistics",
        f"{columns} columns of {num_shards} ranks",
        "5 * 128 / n + 2",
    )
    return num_shards


def shard_cuts(
    statistics: Any,
    candidates: Any,
    vocab_size: int,
    draft: str,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
) -> int:
    """Returns the batch."""
    array("statistics", statistics, ("n", "B", "T", "5 * 128 / n + 2"), ("float32",))
    batch, rows = statistics.shape[1:3]
    num_shards = shard_statistics(statistics, batch, rows)
    expect(draft in DRAFT_KINDS, "draft", repr(draft), " or ".join(map(repr, DRAFT_KINDS)))
    laws = 2 if draft == "logits" else 1
    array("candidates", candidates, (num_shards, laws, batch, rows, 8, 8 * (128 // num_shards)), FLOATS)
    expect(1 <= vocab_size <= MAX_VOCAB, "vocab_size", vocab_size, f"1 to {MAX_VOCAB}")
    sampling(batch, temperature, top_k, top_p, min_p)
    return batch


def cuts(cuts_: Any, batch: int, rows: int, draft: str) -> None:
    """What `shard_cuts` gives; None where nothing is truncated."""
    if cuts_ is not None:
        array("cuts", cuts_, (2 if draft == "logits" else 1, batch, rows, 5), ("float32",))


def shard_weights(
    cuts_: Any,
    trials: Any,
    target_logits: Any,
    shard_: int,
    num_shards: int,
    vocab_size: int,
    draft_logits: Any,
    temperature: Any,
) -> int:
    """Returns the batch."""
    array("target_logits", target_logits, ("B", "T", "V / n"), FLOATS)
    batch, rows, width = target_logits.shape
    expect(num_shards in (1, 2, 4, 8, 16, 32, 64, 128), "num_shards", num_shards, "a power of two up to 128")
    expect(0 <= shard_ < num_shards, "shard", shard_, f"a rank, 0 to {num_shards - 1}")
    expect(1 <= vocab_size <= width * num_shards, "vocab_size", vocab_size, f"1 to n * V / n = {width * num_shards}")
    cuts(cuts_, batch, rows, "one_hot" if draft_logits is None else "logits")
    array("trials", trials, (cuts_.shape[0], batch, rows, "N"), ("float32",))
    if draft_logits is not None:
        array("draft_logits", draft_logits, (batch, rows - 1, width), FLOATS)
    sampling(batch, temperature, None, None, None)
    return batch


def combine_shards(
    statistics: Any,
    draws: Any,
    draft_tokens: Any,
    uniforms_: Any,
    vocab_size: int,
    draft: str,
    draft_lens: Any,
    temperature: Any,
) -> tuple[int, int]:
    array("draft_tokens", draft_tokens, ("B", "K"), ("int32",))
    batch, rows = draft_tokens.shape[0], draft_tokens.shape[1] + 1
    num_shards = shard_statistics(statistics, batch, rows)
    array("draws", draws, (num_shards, batch, 6, 128 // num_shards), ("float32",))
    uniforms(uniforms_, batch, rows + 1)
    whole_number("vocab_size", vocab_size, 1, MAX_VOCAB)
    expect(draft in DRAFT_KINDS, "draft", repr(draft), " or ".join(map(repr, DRAFT_KINDS)))
    if draft_lens is not None:
        array("draft_lens", draft_lens, (batch,), ("int32",))
        in_range("draft_lens", draft_lens, -1, rows - 1, f"-1 (an empty slot) to K = {rows - 1}")
    sampling(batch, temperature, None, None, None)
    return batch, rows
