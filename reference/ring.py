"""Rings, where position p lives in slot p mod S: how many slots, and undoing what rejected rows overwrote."""

from __future__ import annotations

import numpy as np

from draft_verify.reference.cache import key_at, num_heads, value_at


def save_ring(
    key_cache,
    value_cache,
    seq_lens: np.ndarray,
    num_rows: int,
    *,
    block_table: np.ndarray | None = None,
    cache_layout: str = "BHSD",
):
    """What positions seq_lens[b] .. seq_lens[b] + num_rows - 1 are about to overwrite, keys and values
    [B, Hkv, num_rows, D]; zero for an empty slot (negative length)."""
    if isinstance(key_cache, tuple):
        saved = [
            save_ring(keys, values, seq_lens, num_rows, block_table=block_table, cache_layout=cache_layout)
            for keys, values in zip(key_cache, value_cache)
        ]
        return tuple(keys for keys, _ in saved), tuple(values for _, values in saved)

    place = {"cache_layout": cache_layout, "block_table": block_table, "ring": True}
    shape = (len(seq_lens), num_heads(value_cache, cache_layout), num_rows, value_cache.shape[3])
    saved_key = np.zeros(shape, key_cache.dtype)
    saved_value = np.zeros(shape, value_cache.dtype)
    for b in np.flatnonzero(seq_lens >= 0):
        for row in range(num_rows):
            saved_key[b, :, row] = key_at(key_cache, b, int(seq_lens[b]) + row, **place)
            saved_value[b, :, row] = value_at(value_cache, b, int(seq_lens[b]) + row, **place)
    return saved_key, saved_value


def restore_ring(
    key_cache,
    value_cache,
    saved_key,
    saved_value,
    seq_lens: np.ndarray,
    num_accepted: np.ndarray,
    *,
    block_table: np.ndarray | None = None,
    cache_layout: str = "BHSD",
):
    """Saved rows num_accepted[b] + 1 .. T - 1 go back to the slots of positions seq_lens[b] + row; in place."""
    if isinstance(key_cache, tuple):
        for layer in zip(key_cache, value_cache, saved_key, saved_value):
            restore_ring(*layer, seq_lens, num_accepted, block_table=block_table, cache_layout=cache_layout)
        return key_cache, value_cache

    place = {"cache_layout": cache_layout, "block_table": block_table, "ring": True}
    for b in np.flatnonzero((num_accepted >= 0) & (seq_lens >= 0)):
        for row in range(int(num_accepted[b]) + 1, saved_key.shape[2]):
            key_at(key_cache, b, int(seq_lens[b]) + row, **place)[:] = saved_key[b, :, row]
            value_at(value_cache, b, int(seq_lens[b]) + row, **place)[:] = saved_value[b, :, row]
    return key_cache, value_cache
