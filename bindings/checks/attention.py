"""Attention and the merge of its shards."""

from __future__ import annotations

from typing import Any

import numpy as np

from draft_verify.checks.caches import MAX_RING_POSITION, blocks_read, cache_scale, caches
from draft_verify.checks.general import (
    FLOAT8,
    FLOATS,
    array,
    dtype_name,
    expect,
    in_range,
    positive_number,
    values_known,
    whole_number,
)

MAX_HEAD_DIM = 256
MAX_ATTENTION_WINDOW = 64
MAX_ATTENTION_BATCH = 64
MAX_ATTENTION_SLOTS = 131_072
MAX_RUNS = 13_500  # of tokens, a partition: the kernel lists where they lie on the chip
MAX_SHARDS = 128  # a shard a partition


def verify_attention(
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
    expect(batch <= MAX_ATTENTION_BATCH, "query", f"a batch of {batch}", f"1 to {MAX_ATTENTION_BATCH} sequences")
    expect(rows <= MAX_ATTENTION_WINDOW, "query", f"a window of {rows} rows", f"1 to {MAX_ATTENTION_WINDOW}")
    expect(head_dim <= MAX_HEAD_DIM, "query", f"heads of {head_dim}", f"1 to {MAX_HEAD_DIM}")
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
            positive_number(argument, number)
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


def attention_runs(block_table: Any, block_size: int) -> None:
    """Runs of at most 16 tokens move together; a sequence's blocks are listed on as many partitions as divide them."""
    batch, blocks = block_table.shape
    run = max(size for size in (1, 2, 4, 8, 16) if block_size % size == 0)
    parts = max(parts for parts in range(1, 128 // batch + 1) if blocks % parts == 0)
    expect(
        blocks // parts * (block_size // run) <= MAX_RUNS,
        "block_table",
        f"{blocks} blocks of {block_size} tokens",
        f"blocks of a multiple of 16, or a number of them that more than {parts} partitions can share",
    )


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
    expect(outputs.shape[0] <= MAX_SHARDS, "outputs", f"{outputs.shape[0]} shards", f"1 to {MAX_SHARDS}")
    array("lses", lses, tuple(outputs.shape[:4]), ("float32",))
